"""An Election by a Kafka consumer group: whose assignor is called leads."""

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
"""After so long it tries to take part again."""
LEAVE_TIMEOUT: Millis = 5_000
"""As long as that it tries to leave in good order. Otherwise others learn it when its session has run out."""


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What the leader tells all with their assignments."""

    leader: str
    members: tuple[str, ...]


class KafkaElection:
    """The consumer group `<name>` of the topic `<name>_connector_control`, in which each process is a member; the topic stays empty.

    The servers name one consumer that divides the partitions of the topic: it leads. What the assignments carry tells all members who
    that is, and who they are. Generations are the group's own, which the servers keep as long as the group has members.

    A member is told that nobody leads as soon as the group is being formed anew, and when its servers have not answered for nearly as long
    as a session lasts: then they may have named another one.
    """

    def __init__(self, bootstrap: str, name: str, *, session_timeout: Millis = 6_000, heartbeat: Millis = 1_500) -> None:
        """`bootstrap`: `HOST:PORT[,HOST:PORT]`. `session_timeout`: after so long the servers take a silent member for dead; they allow
        `group.min.session.timeout.ms`, 6 s by default, and more. Raises `invalid_request` for a bad name or bad servers.
        """
        assert 2 * heartbeat < session_timeout
        self._bootstrap = check_bootstrap(bootstrap)
        self._name = check_queue_name(name, "name")
        self._topic = f"{name}_connector_control"
        self._session, self._heartbeat = session_timeout, heartbeat
        # The servers keep the answer to one who joins until all others have joined too, for a session at most.
        self._answer = session_timeout + 5_000
        self._task: asyncio.Task[None] | None = None
        self._consumer: AIOKafkaConsumer | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._tell: Callable[[Group], None] | None = None
        self._told: Group | None = None
        self._forming = False
        """The group is being formed, and nobody leads yet."""
        self._heard: Millis = 0
        """When something was asked to which the servers have answered."""

    async def join(self, name: str, told: Callable[[Group], None]) -> None:
        assert self._task is None, "one member takes part once"
        self._tell = told
        self._task = asyncio.create_task(self._run(name))

    async def leave(self) -> None:
        """Nothing is told from the call on. Takes LEAVE_TIMEOUT at most."""
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
                log.warning("group %s: %s has no place: %s", self._name, name, error or type(error).__name__)
            except SluicewayError as error:
                log.error("group %s: %s cannot take part: %s", self._name, name, error)
            except Exception:
                # The client's own fault. A member that took part no more would be taken for alive by itself, and hear of nobody who leads.
                log.exception("group %s: %s has no place", self._name, name)
            self._nobody()
            # Others are not made to wait for a member that comes again by a new name among the servers while its old one is there.
            await self._stop(self._answer)
            await asyncio.sleep(AGAIN / 1000)

    async def _take_part(self, name: str) -> None:
        """Until the place is lost, or may be: raises KafkaError, OSError, TimeoutError."""
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
            # The client's own errors come out here. Waits as long as the group is being formed.
            async with asyncio.timeout(2 * self._answer / 1000):
                await consumer.getmany(timeout_ms=self._heartbeat)
            await self._ask(consumer)

    async def _ask(self, consumer: AIOKafkaConsumer) -> None:
        """Whether the servers answer; raises TimeoutError if they have not for so long that the session may be over.

        The client's heartbeats, which go to the same server, say whether the place is kept, but not that they have gone unanswered.
        """
        asked = system.steady()
        try:
            async with asyncio.timeout(self._left / 1000):
                await consumer.committed(TopicPartition(self._topic, 0))
            self._heard = max(self._heard, asked)
        except TimeoutError:
            # Behind the question that forms the group, which is answered late, this one is not answered either.
            if not self._forming and self._left <= 0:
                raise TimeoutError(f"no answer from Kafka for {system.steady() - self._heard} ms") from None

    @property
    def _left(self) -> Millis:
        """Until the session may be over, by the last heartbeat that may have been heard."""
        return self._heard + self._session - self._heartbeat - system.steady()

    # ---- what the client tells ----------------------------------------------------------------------------------------

    def _revoked(self) -> None:
        self._forming = True
        self._nobody()

    def _assigned(self, said: _Said) -> None:
        self._forming = False
        self._heard = system.steady()
        assert self._consumer is not None
        # The client says it nowhere else.
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
        """Leave the group, or go on trying without being waited for."""
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
        """The assignor has been told more."""


class _Assignor(AbstractPartitionAssignor):  # type: ignore[misc]
    """Gives whoever runs it all partitions, and says so to all. An object where the client usually has a class: it has a member's name."""

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
