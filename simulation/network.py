"""Network between simulated instances: one link per ordered pair, each of which can be cut in one direction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from simulation.loop import Loop, Process
from simulation.network_link import DIRECTIONS, Link, NoAnswerError, NotSentError, Roads
from simulation.promises import BrokenPromiseError
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.peers import Ask, GiveKeys, Learn, LeaseAnywhere, MoveOut, NoteKeys, PeerRequest, ServeSlots, Shut, TakeKeys
from sluiceway.model.requests import MOVE_GROUP, TRANSFER_GROUP, Produce
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.wire import peer

Answer = Callable[[PeerRequest], Awaitable[Any]]
"""An instance's handler of a peer request."""

ECHOED = (Shut, GiveKeys, TakeKeys, ServeSlots, MoveOut)
LATEST: Millis = 12_000
"""Maximum delay of an echoed request, in milliseconds."""

_answering: ContextVar[PeerRequest | None] = ContextVar("answering", default=None)


class Listener(NamedTuple):
    process: Process
    answer: Answer


class Network:
    """Connects instances that listen at addresses. Messages pass through the real codec, so two instances share no objects."""

    def __init__(self, loop: Loop, roads: Roads) -> None:
        self.loop = loop
        self.roads = roads
        self.asked = 0
        self.echo = 0.0
        """Probability that a rebalance request is repeated later, as by a second coordinator."""
        self.deaf: set[str] = set()
        """Names of the processes that receive no notices of queue changes."""
        self._listeners: dict[str, Listener] = {}
        self._links: dict[tuple[Process, Process], Link] = {}

    def listen(self, address: str, process: Process, answer: Answer) -> None:
        self._listeners[address] = Listener(process, answer)

    def transport(self, process: Process) -> SimTransport:
        return SimTransport(self, process)

    def listener(self, address: str) -> Listener | None:
        """Return the live listener at the address, None if there is none."""
        listener = self._listeners.get(address)
        return None if listener is None or listener.process.dead else listener

    def again(self, address: str, body: bytes) -> None:
        """Deliver an earlier request again. Its answer is dropped."""
        listener = self.listener(address)
        if listener is not None:
            self.loop.begin(listener.process, _answered(listener, body))

    def link(self, caller: Process, target: Process) -> Link:
        if (caller, target) not in self._links:
            self._links[caller, target] = Link(self.loop, caller, self.roads, target, withdraws=True)
        return self._links[caller, target]

    def cut(self, sender: Process, receiver: Process) -> None:
        """Cut the direction from `sender` to `receiver`, for requests and for answers."""
        self.link(sender, receiver).cut.add("there")
        self.link(receiver, sender).cut.add("back")

    def uncut(self, sender: Process, receiver: Process) -> None:
        self.link(sender, receiver).free("there")
        self.link(receiver, sender).free("back")

    def free(self) -> None:
        """Restore all links."""
        for link in self._links.values():
            link.free(*DIRECTIONS)

    def down(self, process: Process) -> None:
        """Break the connections of a process that is gone."""
        for (_, target), link in self._links.items():
            if target is process:
                link.break_off()

    def check_hop(self, caller: Process, request: PeerRequest) -> None:
        """Check the one-hop rule: an instance that answers from its own share calls no peer, and one that leases for all asks only for
        peers' shares."""
        answering = _answering.get()
        if not isinstance(answering, Ask) or not isinstance(request, Ask) or _is_transfer(request) or _ends_there(request):
            return
        anywhere = isinstance(answering.request, LeaseAnywhere)
        if not anywhere or isinstance(request.request, LeaseAnywhere):
            asked, asks = type(answering.request).__name__, type(request.request).__name__
            self.loop.fail(BrokenPromiseError(f"{caller.name} asks a peer for {asks} in order to answer another's {asked}"))


def _is_transfer(request: Ask) -> bool:
    """Transfers are exempt: they start in a cycle, which a peer's request may have caused."""
    asked = request.request
    return isinstance(asked, Produce) and asked.key is not None and (asked.key.group or "").startswith((TRANSFER_GROUP, MOVE_GROUP))


def _ends_there(request: Ask) -> bool:
    """Exempt requests: the owner of a key's home, or of a closing target, sends them to a peer that calls no further one."""
    asked = request.request
    return isinstance(asked, NoteKeys) or (isinstance(asked, Produce) and asked.key is not None and asked.partition is not None)


class SimTransport:
    """Transport port of one instance."""

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
        """No-op: nothing to release."""


async def _answered(listener: Listener, body: bytes) -> tuple[bytes, bool]:
    """Return the encoded answer, and whether it is an error."""
    request = peer.decode_request(body)
    _answering.set(request)
    try:
        return peer.encode_answer(request, await listener.answer(request)), False
    except SluicewayError as error:
        return peer.encode_error(error), True
