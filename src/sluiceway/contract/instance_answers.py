"""The instances of a cluster and the rounds in which they divide the partitions, as the server answers them."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from sluiceway.contract.fields import Answer, Duration, Time, about, one_of

InstanceState = Literal["alive", "silent", "leaving", "joining"]
"""As the answering instance sees it. `silent`: no heartbeat for so long that it has stopped serving its partitions. `leaving`: it is
handing them over. `joining`, only of the answering instance: it is not a member yet, or no longer."""

_NUMBER = about("Rises with each round.")
_TRIGGER = about("Reason of the round, as text.")
_PARTICIPANTS = about("Participating instances.")
_MOVED = about("Partitions that were assigned to another instance, or for the first time.")
_KEPT = about("Partitions that kept their owner.")


class Instance(Answer, frozen=True, kw_only=True):
    """An instance, as the answering instance sees it."""

    instance: Annotated[str, about("The instance's name in the cluster, new at each start.")]
    address: Annotated[str | None, about("The URL by which other instances reach it; null: not known.")] = None
    here: Annotated[bool, about("Whether this instance sent the answer.")] = False
    state: Annotated[
        str,
        one_of(InstanceState),
        about(
            "As the answering instance sees it. `silent`: no heartbeat for so long that it has stopped serving its partitions. "
            "`leaving`: it is handing over its partitions. `joining`, only of the answering instance: it is not a member yet, or no longer."
        ),
    ] = "alive"
    silent_for: Annotated[Duration, about("Time since the answering instance last saw a new heartbeat of it; normally below a second.")] = (
        "0s"
    )
    joined_at: Annotated[Time | None, about("When it joined, by its own clock; null: not known.")] = None
    partitions: Annotated[int, about("Number of partitions assigned to it, in all queues.")] = 0
    release: Annotated[str | None, about("Its version of Sluiceway; null: not known.")] = None
    levels: Annotated[list[int] | None, about("The lowest and the highest compatibility level that it understands; null: not known.")] = (
        None
    )
    zone: Annotated[str | None, about("Its failure domain (`cluster.zone`); null: none.")] = None
    load: Annotated[
        float | None,
        about(
            "What its partitions take of what an instance can do on the machine on which that was measured: 1.0 is all of it. An average "
            "over 30 s, as it last reported it; changes of less than a tenth are not reported. Null: not known."
        ),
    ] = None
    items_per_second: Annotated[int | None, about("Items produced, leased and completed there; null: not known.")] = None
    bytes_per_second: Annotated[int | None, about("Bytes of items written there; null: not known.")] = None


class LastRound(Answer, frozen=True, kw_only=True):
    """The last round; `rounds.list` has those that are sealed, with their times."""

    number: Annotated[int, _NUMBER]
    sealed: Annotated[bool, about("Whether the round is complete. Until then the previous round's plan applies.")]
    trigger: Annotated[str, _TRIGGER]
    participants: Annotated[list[str], _PARTICIPANTS] = []
    moved: Annotated[int, _MOVED] = 0
    kept: Annotated[int, _KEPT] = 0


class GroupTimes(TypedDict, total=False):
    """The cluster's timing parameters."""

    settle_timeout: Annotated[
        Duration, about("A round is sealed when no instance has joined it for this long; at once if it replaces one.")
    ]
    round_interval: Annotated[Duration, about("Minimum time between two rounds.")]
    heartbeat_interval: Annotated[Duration, about("Maximum time between two rounds.")]
    beat_interval: Annotated[Duration, about("Time between two heartbeats of an instance.")]
    lease_timeout: Annotated[Duration, about("An instance stops serving after this long without a stored heartbeat of its own.")]
    member_timeout: Annotated[Duration, about("The other instances replace an instance after this long without a heartbeat.")]


class PartitionPin(Answer, frozen=True, kw_only=True):
    """Where a partition is to be. While no such instance is in the cluster, or none in that zone, it is anywhere."""

    queue_name: str
    partition: int
    instance: Annotated[
        str | None, about("Name of an instance (`cluster.name`), without the suffix that each start adds; null: not pinned to one.")
    ] = None
    zone: Annotated[str | None, about("Zone; null: not pinned to one.")] = None


class InstanceList(Answer, frozen=True, kw_only=True):
    """The instances of the cluster by name, and how they divide the partitions. A standalone server has no timing parameters and no
    rounds."""

    items: Annotated[list[Instance], about("The instances.")]
    strategy: Annotated[str, about("How they divide the partitions: `rounds`, `claims`, or `static` (one instance owns them all).")]
    era: Annotated[int, about("Rises with each change of the strategy; part of the fence.")]
    parameters: Annotated[GroupTimes | None, about("The cluster's timing parameters; null: a standalone server.")] = None
    round: Annotated[LastRound | None, about("The last round; null: there has been none.")] = None
    load_moves: Annotated[
        int | None, about("Partitions that may move in a minute to level the loads of the instances; 0: none. Null: a standalone server.")
    ] = None
    pins: Annotated[list[PartitionPin], about("The pinned partitions, by queue and number.")] = []
    level: Annotated[int, about("The compatibility level in use: the form of what is stored, and of what instances say to one another.")]
    reachable_level: Annotated[
        int, about("The highest level that all instances understand. If it is above `level`, `upgrades.finalize` raises the level to it.")
    ]


class MovedPartition(Answer, frozen=True, kw_only=True):
    """A partition that a round assigned to another instance."""

    queue_name: Annotated[str | None, about("The queue; null: it has been deleted since.")]
    partition: Annotated[int, about("The partition's number.")]
    before: Annotated[str | None, about("The previous owner; null: none.")]
    owner: Annotated[str, about("The new owner.")]


class Round(Answer, frozen=True, kw_only=True):
    """A sealed round. `sealed_at` and `duration` are by the clock of the instance that sealed it."""

    number: Annotated[int, _NUMBER]
    trigger: Annotated[str, _TRIGGER]
    participants: Annotated[list[str], _PARTICIPANTS]
    moved: Annotated[int, _MOVED]
    kept: Annotated[int, _KEPT]
    duration: Annotated[Duration, about("Time from its opening to its sealing.")]
    sealed_at: Annotated[Time, about("When it was sealed, by the clock of the instance that sealed it.")]
    sealed_by: Annotated[str, about("The instance that made the plan; any participant may.")]
    moves: Annotated[
        list[MovedPartition],
        about("The moved partitions. A round that moves thousands records only some of them; `moved` counts them all."),
    ] = []


class RoundList(Answer, frozen=True, kw_only=True):
    """The last rounds, newest first."""

    items: Annotated[list[Round], about("The rounds.")]
