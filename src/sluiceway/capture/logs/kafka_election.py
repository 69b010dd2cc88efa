"""Kafka election: an Election by a consumer group; the member whose assignor runs leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from aiokafka.errors import KafkaError

from sluiceway.adapters import system
from sluiceway.capture.logs.kafka_topics import check_bootstrap, ensure, stop_consumer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.task_records import Group

log = logging.getLogger(__name__)

AGAIN: Millis = 1_000
"""Delay before another attempt to take part."""
LEAVE_TIMEOUT: Millis = 5_000
"""Time limit for leaving in order. Beyond it, others notice when the member's session has run out."""


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """The leader's announcement, sent to all members with their assignments."""

    leader: str
    members: tuple[str, ...]


class KafkaElection:
    """The consumer group `<name>` of the topic `<name>_connector_control`, in which each process is a member; the topic stays empty.

    The servers choose one consumer to divide the topic's partitions: it leads. The assignments announce the leader and the members to all.
    Generations are the group's own, which the servers keep as long as the group has members.

    A member is told that there is no leader as soon as the group rebalances, and when its servers have not answered for nearly a session:
    then they may have named another one.
    """

    def __init__(self, bootstrap: str, name: str, *, session_timeout: Millis = 6_000, heartbeat: Millis = 1_500) -> None:
        """`bootstrap`: `HOST:PORT[,HOST:PORT]`. `session_timeout`: silence after which the servers consider a member dead; their minimum is
        `group.min.session.timeout.ms`, 6 s by default. Raises `invalid_request` for a bad name or bad servers."""
        assert 2 * heartbeat < session_timeout
        self._bootstrap = check_bootstrap(bootstrap)
        self._name = check_queue_name(name, "name")
        self._topic = f"{name}_connector_control"
        self._session, self._heartbeat = session_timeout, heartbeat
        # The servers hold the answer to a join until all others have joined too, for a session at most.
        self._answer = session_timeout + 5_000
        self._task: asyncio.Task[None] | None = None
        self._consumer: AIOKafkaConsumer | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._tell: Callable[[Group], None] | None = None
        self._told: Group | None = None
        self._forming = False
        """The group is rebalancing, without a leader."""
        self._heard: Millis = 0
        """Send time of the last request that the servers have answered."""

    async def join(self, name: str, told: Callable[[Group], None]) -> None:
        assert self._task is None, "one member takes part once"
        self._tell = told
        self._task = asyncio.create_task(self._run(name))

    async def leave(self) -> None:
        """Leave. No notification follows the call. Takes at most LEAVE_TIMEOUT."""
        self._tell = None
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._stop(LEAVE_TIMEOUT)

    async def _run(self, name: str) -> None:
        while True:
            try:
                await self._take_part(name)
            except (KafkaError, OSError, TimeoutError) as error:
                log.warning("group %s: %s cannot join: %s", self._name, name, error or type(error).__name__)
            except SluicewayError as error:
                log.error("group %s: %s is refused: %s", self._name, name, error)
            except Exception:
                # An error inside the client. A member that gave up would consider itself alive, and never learn the leader.
                log.exception("group %s: %s cannot join", self._name, name)
            self._nobody()
            # Stop first: other members would otherwise wait for the old membership while this member rejoins under a new id.
            await self._stop(self._answer)
            await asyncio.sleep(AGAIN / 1000)

    async def _take_part(self, name: str) -> None:
        """Take part until the place is lost, or may be: raises KafkaError, OSError, TimeoutError."""
        await ensure(self._bootstrap, self._topic, self._answer, {}, {})
        consumer = self._consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            group_id=self._name,
            partition_assignment_strategy=[_Assignor(name, self._assigned)],
            session_timeout_ms=self._session,
            rebalance_timeout_ms=self._session,
            heartbeat_interval_ms=self._heartbeat,
            request_timeout_ms=self._answer,
            enable_auto_commit=False,
            fetch_max_wait_ms=self._session // 2,
        )
        consumer.subscribe([self._topic], listener=_Listener(self._revoked))
        async with asyncio.timeout(2 * self._answer / 1000):
            await consumer.start()
        while True:
            # The client's own errors surface here. Waits while the group is rebalancing.
            async with asyncio.timeout(2 * self._answer / 1000):
                await consumer.getmany(timeout_ms=self._heartbeat)
            await self._ask(consumer)

    async def _ask(self, consumer: AIOKafkaConsumer) -> None:
        """Check that the servers answer; raises TimeoutError if they have not for so long that the session may be over.

        The client's heartbeats, which go to the same server, report a lost place, but not that they have gone unanswered.
        """
        asked = system.steady()
        try:
            async with asyncio.timeout(self._left / 1000):
                await consumer.committed(TopicPartition(self._topic, 0))
            self._heard = max(self._heard, asked)
        except TimeoutError:
            # Requests queue behind the join, which is answered late.
            if not self._forming and self._left <= 0:
                raise TimeoutError(f"no answer from Kafka for {system.steady() - self._heard} ms") from None

    @property
    def _left(self) -> Millis:
        """Milliseconds until the session may be over, counted from the last heartbeat possibly received."""
        return self._heard + self._session - self._heartbeat - system.steady()

    # ---- callbacks of the client --------------------------------------------------------------------------------------

    def _revoked(self) -> None:
        self._forming = True
        self._nobody()

    def _assigned(self, said: _Said) -> None:
        self._forming = False
        self._heard = system.steady()
        assert self._consumer is not None
        # The client exposes it nowhere else.
        generation: int = self._consumer._coordinator.generation
        self._say(Group(generation, said.leader, said.members))

    def _nobody(self) -> None:
        if self._told is not None:
            self._say(Group(self._told.generation, "", ()))

    def _say(self, group: Group) -> None:
        if self._tell is None or group == self._told:
            return
        self._told = group
        self._tell(group)

    async def _stop(self, timeout: Millis) -> None:
        """Leave the group; after `timeout` the attempt continues in the background."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._stopping = asyncio.create_task(self._close(consumer))
        if self._stopping is not None:
            await asyncio.wait([self._stopping], timeout=timeout / 1000)

    async def _close(self, consumer: AIOKafkaConsumer) -> None:
        try:
            await stop_consumer(consumer)
        except (KafkaError, OSError) as error:
            log.debug("group %s: leaving: %r", self._name, error)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, revoked: Callable[[], None]) -> None:
        self._revoked = revoked

    def on_partitions_revoked(self, revoked: object) -> None:
        self._revoked()

    def on_partitions_assigned(self, assigned: object) -> None:
        """Nothing to do: the assignor has the details."""


class _Assignor(AbstractPartitionAssignor):  # type: ignore[misc]
    """Assigns all partitions to the member that runs it, and announces that to all. An instance where the client expects a class: it holds
    a member's name."""

    name = "sluiceway-tasks"
    version = 0

    def __init__(self, member: str, assigned: Callable[[_Said], None]) -> None:
        self._member, self._assigned = member, assigned

    def metadata(self, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        return ConsumerProtocolMemberMetadata(self.version, list(topics), self._member.encode())

    def assign(self, cluster: object, members: Mapping[str, ConsumerProtocolMemberMetadata]) -> dict[str, ConsumerProtocolMemberAssignment]:
        names = {each: metadata.user_data.decode() for each, metadata in members.items()}
        said = msgspec.json.encode(_Said(self._member, tuple(sorted(set(names.values())))))
        topics = sorted({topic for metadata in members.values() for topic in metadata.subscription})
        return {
            each: ConsumerProtocolMemberAssignment(self.version, [(topic, [0]) for topic in topics if name == self._member], said)
            for each, name in names.items()
        }

    def on_assignment(self, assignment: ConsumerProtocolMemberAssignment) -> None:
        self._assigned(msgspec.json.decode(assignment.user_data, type=_Said))
