"""The memory that makes a produce repeatable: which keys this partition has seen, and what it answered."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

import msgspec

from sluiceway.core.distribution import slot_of_name
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import GROUP_KEEP, MAX_GROUP_KEYS, MAX_KEYS
from sluiceway.model.requests import MOVE_GROUP, TRANSFER_GROUP, ProduceKey


class Seen(msgspec.Struct, array_like=True, frozen=True):
    """The first produce under a key: what it said and where it went. `partition` None: into this one."""

    digest: bytes
    first_offset: int
    count: int
    partition: int | None = None


class KeyRecord(msgspec.Struct, array_like=True):
    """Either one key, remembered `until` a time, or a group with all keys of its present `sequence`, forgotten long after its last use.

    `until` 0 is for ever: the system's own groups, and those of a record that was written before groups had an end.
    """

    seen: dict[str, Seen]
    sequence: int
    until: Millis


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(KeyRecord).decode


class KeyMemory:
    """Pure; says which records changed by `touched`.

    A group's name and a lone key never meet: their record keys differ in the first letter.
    """

    def __init__(self) -> None:
        self.records: dict[str, KeyRecord] = {}
        self.touched: dict[str, None] = {}
        self._ends: list[tuple[Millis, str]] = []

    def record(self, name: str) -> bytes | None:
        """The bytes to store; None if it is forgotten."""
        record = self.records.get(name)
        return None if record is None else pack(record)

    def load(self, name: str, data: bytes) -> None:
        record = self.records[name] = unpack(data)
        if record.until:
            heapq.heappush(self._ends, (record.until, name))

    def find(self, key: ProduceKey, digest: bytes) -> Seen | None:
        """What was answered under this key; None if it is new. Raises key_conflict, stale_sequence, too_many_requests."""
        record = self.records.get(_name(key))
        if record is None:
            if len(self.records) >= MAX_KEYS and _until(key, 1):
                raise SluicewayError("too_many_requests", f"the partition remembers {MAX_KEYS} idempotency keys already; try later")
            return None
        if key.group is not None and key.sequence != record.sequence:
            if key.sequence < record.sequence:
                raise SluicewayError(
                    "stale_sequence",
                    f"idempotency_sequence: group {key.group!r} has moved on from {key.sequence} to {record.sequence}",
                    "idempotency_sequence",
                )
            return None
        seen = record.seen.get(key.key)
        if seen is None and len(record.seen) >= MAX_GROUP_KEYS:
            detail = f"group {key.group!r} has {MAX_GROUP_KEYS} keys of sequence {key.sequence} already; raise idempotency_sequence"
            raise SluicewayError("invalid_request", f"idempotency_group: {detail}", "idempotency_group")
        if seen is not None and seen.digest != digest:
            raise SluicewayError("key_conflict", f"idempotency_key: {key.key!r} was used for other items", "idempotency_key")
        return seen

    def has(self, key: ProduceKey) -> bool:
        """Whether something was answered under this key."""
        record = self.records.get(_name(key))
        return record is not None and record.sequence == key.sequence and key.key in record.seen

    def of_slots(self, slots: Collection[int], of: int, partition: int) -> dict[str, bytes]:
        """What is remembered of the keys of these slots, as that `partition`, which this one is, would tell it to others."""
        given: dict[str, bytes] = {}
        for name, record in self.records.items():
            if _is_of(name, slots, of):
                seen = {key: each if each.partition is not None else _in(each, partition) for key, each in record.seen.items()}
                given[name] = pack(KeyRecord(seen, record.sequence, record.until))
        return given

    def replace(self, slots: Collection[int], of: int, given: Mapping[str, bytes]) -> None:
        """Of the keys of these slots remember only what was given. Windows go on as they began."""
        for name in [name for name in self.records if _is_of(name, slots, of)]:
            del self.records[name]
            self.touched[name] = None
        for name, data in given.items():
            self.load(name, data)
            self.touched[name] = None

    def remember(self, key: ProduceKey, seen: Seen, now: Millis) -> None:
        name = _name(key)
        record = self.records.get(name)
        if record is None or record.sequence != key.sequence:
            record = self.records[name] = KeyRecord({}, key.sequence, record.until if record is not None else 0)
        until = _until(key, now)
        if until and (record.until == 0 or key.group is not None):
            if record.until == 0:
                heapq.heappush(self._ends, (until, name))
            record.until = until
        record.seen[key.key] = seen
        self.touched[name] = None

    def forget_old(self, now: Millis, most: int = 1_000) -> None:
        """Drop lone keys whose window is over and groups that nobody uses, a bounded number a call."""
        for _ in range(most):
            if not self._ends or self._ends[0][0] > now:
                break
            name = heapq.heappop(self._ends)[1]
            until = self.records[name].until if name in self.records else 0
            if not until:
                continue  # It went elsewhere, or came from there anew, since it was entered here.
            if until > now:
                # Used again since it was entered here.
                heapq.heappush(self._ends, (until, name))
                continue
            del self.records[name]
            self.touched[name] = None


def _until(key: ProduceKey, now: Millis) -> Millis:
    if key.group is None:
        return now + key.window
    return 0 if key.group.startswith((TRANSFER_GROUP, MOVE_GROUP)) else now + GROUP_KEEP


def _in(seen: Seen, partition: int) -> Seen:
    return Seen(seen.digest, seen.first_offset, seen.count, partition)


def _is_of(name: str, slots: Collection[int], of: int) -> bool:
    """Whether the record of that name is of one of these slots. What partitions are moved stays with them."""
    return slot_of_name(name[1:], of) in slots and not name.startswith(f"g{MOVE_GROUP}")


def _name(key: ProduceKey) -> str:
    return f"k{key.key}" if key.group is None else f"g{key.group}"
