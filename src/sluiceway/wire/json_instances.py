"""JSON codec of the calls on a cluster's instances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sluiceway.contract import instance_answers as answers
from sluiceway.contract.fields import time_field
from sluiceway.contract.item_answers import PartitionExplanation
from sluiceway.core.group.group_records import BOUNDS, MAX_LOAD_MOVES, Move, SealedRound, Strategy
from sluiceway.kernel.clock import Millis, format_duration, parse_duration
from sluiceway.kernel.errors import invalid
from sluiceway.model.instances import Belonging, ClusterInfo, InstanceInfo, RoundInfo
from sluiceway.wire.decoding import JsonDecoder

MAX_ROUNDS = 100


class RoundsListCall(msgspec.Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_ROUNDS)] = 20


class InstancesUpdateCall(msgspec.Struct, forbid_unknown_fields=True):
    """Change the group's parameters or strategy. Absent fields keep their values."""

    settle_timeout: str | UnsetType = UNSET
    round_interval: str | UnsetType = UNSET
    heartbeat_interval: str | UnsetType = UNSET
    beat_interval: str | UnsetType = UNSET
    lease_timeout: str | UnsetType = UNSET
    member_timeout: str | UnsetType = UNSET
    strategy: Literal["rounds", "claims"] | UnsetType = UNSET
    load_moves: Annotated[int, Meta(ge=0, le=MAX_LOAD_MOVES)] | UnsetType = UNSET

    def times(self) -> dict[str, Millis]:
        """The given parameters in milliseconds, by name. Raises `invalid_request` for a malformed one, or if the call changes nothing."""
        found = {name: parse_duration(text, name) for name in BOUNDS if (text := getattr(self, name)) is not UNSET}
        if not found and self.strategy is UNSET and self.load_moves is UNSET:
            raise invalid("body", f"nothing to change; give at least one of {', '.join(BOUNDS)}, strategy, load_moves")
        return found

    def wanted_strategy(self) -> Strategy | None:
        """The given strategy; None: unchanged."""
        return None if self.strategy is UNSET else self.strategy

    def wanted_load_moves(self) -> int | None:
        """The given bound; None: unchanged."""
        return None if self.load_moves is UNSET else self.load_moves


decode_rounds_list = JsonDecoder(RoundsListCall)
decode_instances_update = JsonDecoder(InstancesUpdateCall)


def instance_list(cluster: ClusterInfo) -> bytes:
    """The cluster's instances, parameters and last round, as JSON."""
    return msgspec.json.encode(
        answers.InstanceList(
            items=[_instance(each) for each in cluster.instances],
            strategy=cluster.strategy,
            era=cluster.era,
            parameters=_times(cluster.parameters),
            round=_round(cluster.round),
            load_moves=cluster.load_moves,
            pins=[
                answers.PartitionPin(
                    queue_name=each.queue_name, partition=each.partition, instance=each.instance or None, zone=each.zone or None
                )
                for each in cluster.pins
            ],
            level=cluster.level,
            reachable_level=cluster.reachable_level,
        )
    )


def _instance(info: InstanceInfo) -> answers.Instance:
    return answers.Instance(
        instance=info.name,
        address=info.address or None,
        here=info.here,
        state=info.state,
        silent_for=format_duration(info.silent_for),
        joined_at=time_field(info.joined_at),
        partitions=info.partitions,
        release=info.release or None,
        levels=list(info.levels) if info.levels else None,
        zone=info.zone or None,
        load=info.load,
        items_per_second=info.items,
        bytes_per_second=info.bytes,
    )


def _times(parameters: Mapping[str, Millis] | None) -> answers.GroupTimes | None:
    return None if parameters is None else cast("answers.GroupTimes", {name: format_duration(parameters[name]) for name in BOUNDS})


def _round(found: RoundInfo | None) -> answers.LastRound | None:
    if found is None:
        return None
    return answers.LastRound(
        number=found.number,
        sealed=found.sealed,
        trigger=found.trigger,
        participants=list(found.participants),
        moved=found.moved,
        kept=found.kept,
    )


def round_list(rounds: Iterable[SealedRound], queues: Mapping[str, str]) -> bytes:
    """The rounds with their moves, as JSON. `queues`: queue names by incarnation; a missing incarnation means a deleted queue."""
    return msgspec.json.encode(answers.RoundList(items=[_sealed(each, queues) for each in rounds]))


def _sealed(found: SealedRound, queues: Mapping[str, str]) -> answers.Round:
    return answers.Round(
        number=found.number,
        trigger=found.trigger,
        participants=list(found.participants),
        moved=found.moved,
        kept=found.kept,
        duration=format_duration(found.duration),
        sealed_at=time_field(found.sealed_at),
        sealed_by=found.sealed_by,
        moves=[_move(each, queues) for each in found.moves],
    )


def _move(found: Move, queues: Mapping[str, str]) -> answers.MovedPartition:
    incarnation, _, partition = found.item.rpartition(".")
    return answers.MovedPartition(
        queue_name=queues.get(incarnation), partition=int(partition), before=found.before or None, owner=found.owner
    )


def partition_explained(partition: int, backend: str, state: str, found: Belonging) -> bytes:
    """The ownership of a partition, with its reason, as JSON."""
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
            pinned_instance=found.pinned_instance or None,
            pinned_zone=found.pinned_zone or None,
        )
    )
