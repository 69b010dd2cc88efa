"""How simulated instances reach one another: a way from each to each, of which any may be cut in one direction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from simulation.loop import Loop, Process
from simulation.network_link import DIRECTIONS, Link, NoAnswerError, NotSentError, Roads
from simulation.promises import BrokenPromiseError
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.peers import Ask, GiveKeys, Learn, LeaseAnywhere, MoveOut, NoteKeys, PeerRequest, Shut, TakeKeys
from sluiceway.model.requests import MOVE_GROUP, TRANSFER_GROUP, Produce
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.wire import peer

Answer = Callable[[PeerRequest], Awaitable[Any]]
"""What an instance does with a peer's request."""

ECHOED = (Shut, GiveKeys, TakeKeys, MoveOut)
LATEST: Millis = 12_000
"""How late it is asked again at most."""

_answering: ContextVar[PeerRequest | None] = ContextVar("answering", default=None)


class Listener(NamedTuple):
    process: Process
    answer: Answer


class Network:
    """Instances listen at addresses. What they say to one another goes through the real codec, so nothing is shared by two of them."""

    def __init__(self, loop: Loop, roads: Roads) -> None:
        self.loop = loop
        self.roads = roads
        self.asked = 0
        self.echo = 0.0
        """How likely it is that what a rebalance asks is asked once more, later, as by a coordinator that was followed by another."""
        self.deaf: set[str] = set()
        """Processes that are not told of changes of queues, by name."""
        self._listeners: dict[str, Listener] = {}
        self._links: dict[tuple[Process, Process], Link] = {}

    def listen(self, address: str, process: Process, answer: Answer) -> None:
        self._listeners[address] = Listener(process, answer)

    def transport(self, process: Process) -> SimTransport:
        return SimTransport(self, process)

    def listener(self, address: str) -> Listener | None:
        """Who lives there."""
        listener = self._listeners.get(address)
        return None if listener is None or listener.process.dead else listener

    def again(self, address: str, body: bytes) -> None:
        """What was asked there once arrives again, and nobody waits for an answer."""
        listener = self.listener(address)
        if listener is not None:
            self.loop.begin(listener.process, _answered(listener, body))

    def link(self, caller: Process, target: Process) -> Link:
        if (caller, target) not in self._links:
            self._links[caller, target] = Link(self.loop, caller, self.roads, target, withdraws=True)
        return self._links[caller, target]

    def cut(self, sender: Process, receiver: Process) -> None:
        """Nothing of the one reaches the other any more, neither what it asks nor what it answers."""
        self.link(sender, receiver).cut.add("there")
        self.link(receiver, sender).cut.add("back")

    def uncut(self, sender: Process, receiver: Process) -> None:
        self.link(sender, receiver).free("there")
        self.link(receiver, sender).free("back")

    def free(self) -> None:
        """All ways are free again."""
        for link in self._links.values():
            link.free(*DIRECTIONS)

    def down(self, process: Process) -> None:
        """The process is gone, and its connections break."""
        for (_, target), link in self._links.items():
            if target is process:
                link.break_off()

    def check_hop(self, caller: Process, request: PeerRequest) -> None:
        """Whoever answers from its own share asks nobody else; who leases for others asks only for what is theirs."""
        answering = _answering.get()
        if not isinstance(answering, Ask) or not isinstance(request, Ask) or _is_transfer(request) or _ends_there(request):
            return
        anywhere = isinstance(answering.request, LeaseAnywhere)
        if not anywhere or isinstance(request.request, LeaseAnywhere):
            asked, asks = type(answering.request).__name__, type(request.request).__name__
            self.loop.fail(BrokenPromiseError(f"{caller.name} asks a peer for {asks} in order to answer another's {asked}"))


def _is_transfer(request: Ask) -> bool:
    """It is begun by a turn, which may be that of a peer's request."""
    asked = request.request
    return isinstance(asked, Produce) and asked.key is not None and (asked.key.group or "").startswith((TRANSFER_GROUP, MOVE_GROUP))


def _ends_there(request: Ask) -> bool:
    """The owner of a key's home, or of a target that goes, asks this of another one, which asks nobody."""
    asked = request.request
    return isinstance(asked, NoteKeys) or (isinstance(asked, Produce) and asked.key is not None and asked.partition is not None)


class SimTransport:
    """The Transport of one instance."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    async def ask(self, address: str, request: PeerRequest, timeout: Millis, request_id: str = "") -> Any:
        network = self._network
        network.asked += 1
        network.check_hop(self._process, request)
        listener = network.listener(address)
        if listener is None:
            raise PeerRefusedError(f"{address} cannot be reached: connection refused")
        if isinstance(request, Learn) and listener.process.name in network.deaf:
            raise PeerUnknownError(f"{address} has not answered")
        body = peer.encode_request(request)
        if isinstance(request, Ask) and isinstance(request.request, ECHOED) and network.loop.random.random() < network.echo:
            network.loop.after(network.loop.random.random() * LATEST, lambda: network.again(address, body))
        try:
            answer, is_error = await network.link(self._process, listener.process).call(lambda: _answered(listener, body), timeout)
        except NotSentError:
            raise PeerRefusedError(f"{address} cannot be reached") from None
        except NoAnswerError:
            raise PeerUnknownError(f"{address} has not answered") from None
        if is_error:
            raise peer.decode_error(answer)
        return peer.decode_answer(request, answer)

    async def close(self) -> None:
        """There is nothing to release."""


async def _answered(listener: Listener, body: bytes) -> tuple[bytes, bool]:
    """The body of the answer, and whether it is an error."""
    request = peer.decode_request(body)
    _answering.set(request)
    try:
        return peer.encode_answer(request, await listener.answer(request)), False
    except SluicewayError as error:
        return peer.encode_error(error), True
