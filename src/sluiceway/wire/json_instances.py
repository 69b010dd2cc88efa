"""JSON calls on the instances of a cluster, and their answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sluiceway.contract.fields import Duration, TimeText
from sluiceway.contract.item_answers import PartitionExplanation
from sluiceway.core.group.group_records import BOUNDS, Move, SealedRound, Strategy
from sluiceway.kernel.clock import Millis, format_duration, format_time, parse_duration
from sluiceway.kernel.errors import invalid
from sluiceway.model import instances
from sluiceway.model.instances import Belonging, ClusterInfo, InstanceState
from sluiceway.wire.decoding import JsonDecoder
from sluiceway.wire.shapes import Shape

MAX_ROUNDS = 100


class RoundsListCall(msgspec.Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_ROUNDS)] = 20


class InstancesUpdateCall(msgspec.Struct, forbid_unknown_fields=True):
    """What is not given stays as it is."""

    settle_timeout: str | UnsetType = UNSET
    round_interval: str | UnsetType = UNSET
    heartbeat_interval: str | UnsetType = UNSET
    beat_interval: str | UnsetType = UNSET
    lease_timeout: str | UnsetType = UNSET
    member_timeout: str | UnsetType = UNSET
    strategy: Literal["rounds", "claims"] | UnsetType = UNSET

    def times(self) -> dict[str, Millis]:
        """Those that are given. Raises `invalid_request`, also if nothing is."""
        found = {name: parse_duration(text, name) for name in BOUNDS if (text := getattr(self, name)) is not UNSET}
        if not found and self.strategy is UNSET:
            raise invalid("body", f"expected one of {', '.join(BOUNDS)}, strategy")
        return found

    def wanted_strategy(self) -> Strategy | None:
        return None if self.strategy is UNSET else self.strategy


class InstanceInfo(Shape):
    """An instance, as the one that answers sees it."""

    instance: str
    address: str | None
    here: bool
    state: InstanceState
    silent_for: Duration
    joined_at: TimeText | None
    partitions: int


class LastRound(Shape):
    """The last round; `rounds.list` has those that are sealed, with their times."""

    number: int
    sealed: bool
    trigger: str
    participants: list[str]
    moved: int
    kept: int


class GroupTimes(Shape):
    """The times by which the instances follow one another."""

    settle_timeout: Duration
    round_interval: Duration
    heartbeat_interval: Duration
    beat_interval: Duration
    lease_timeout: Duration
    member_timeout: Duration


class InstanceList(Shape):
    """The instances of the cluster by name, and how they divide the partitions. A server that is alone has no times and no rounds."""

    items: list[InstanceInfo]
    strategy: str
    era: int
    parameters: GroupTimes | None
    round: LastRound | None


class MovedPartition(Shape):
    """A partition that went to another instance."""

    queue_name: str | None
    partition: int
    before: str | None
    owner: str


class SealedRoundInfo(Shape):
    """A round that is over. `sealed_at`, and how long it took, are by the clocks of the instance that sealed it."""

    number: int
    trigger: str
    participants: list[str]
    moved: int
    kept: int
    duration: Duration
    sealed_at: TimeText
    sealed_by: str
    moves: list[MovedPartition]


class RoundList(Shape):
    """The last rounds, the newest first."""

    items: list[SealedRoundInfo]


decode_rounds_list = JsonDecoder(RoundsListCall)
decode_instances_update = JsonDecoder(InstancesUpdateCall)


def instance_list(cluster: ClusterInfo) -> bytes:
    shown = InstanceList(
        [_instance(each) for each in cluster.instances], cluster.strategy, cluster.era, _times(cluster.parameters), _round(cluster.round)
    )
    return msgspec.json.encode(shown)


def _instance(info: instances.InstanceInfo) -> InstanceInfo:
    joined_at = None if info.joined_at is None else format_time(info.joined_at)
    return InstanceInfo(
        info.name, info.address or None, info.here, info.state, format_duration(info.silent_for), joined_at, info.partitions
    )


def _times(parameters: Mapping[str, Millis] | None) -> GroupTimes | None:
    return None if parameters is None else GroupTimes(**{name: format_duration(each) for name, each in parameters.items()})


def _round(found: instances.RoundInfo | None) -> LastRound | None:
    if found is None:
        return None
    return LastRound(found.number, found.sealed, found.trigger, list(found.participants), found.moved, found.kept)


def round_list(rounds: Iterable[SealedRound], queues: Mapping[str, str]) -> bytes:
    """`queues` has the names by incarnation; one that is not there was deleted."""
    return msgspec.json.encode(RoundList([_sealed(each, queues) for each in rounds]))


def _sealed(found: SealedRound, queues: Mapping[str, str]) -> SealedRoundInfo:
    duration, sealed_at = format_duration(found.duration), format_time(found.sealed_at)
    moves = [_move(each, queues) for each in found.moves]
    return SealedRoundInfo(
        found.number, found.trigger, list(found.participants), found.moved, found.kept, duration, sealed_at, found.sealed_by, moves
    )


def _move(found: Move, queues: Mapping[str, str]) -> MovedPartition:
    incarnation, _, partition = found.item.rpartition(".")
    return MovedPartition(queues.get(incarnation), int(partition), found.before or None, found.owner)


def partition_explained(partition: int, backend: str, state: str, found: Belonging) -> bytes:
    return msgspec.json.encode(
        PartitionExplanation(
            partition=partition,
            owner=found.owner,
            address=found.address,
            backend=backend,
            state=state,
            reason=found.reason,
            era=found.era,
            grant=found.grant,
            waits_for=list(found.waits_for),
        )
    )
