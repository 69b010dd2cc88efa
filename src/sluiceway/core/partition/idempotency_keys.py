"""Idempotency-key memory, which makes a produce repeatable: the keys this partition has seen, and its answers.

A partition remembers a key in one of three roles, each in records of its own (ADRs 34 and 53).

* The key's *home* has either the answer, or an *intent*: the partition that is to take the items, the *target*. An intent is durable before
  its target is asked, and only the target knows whether it has the items.
* The *target* of an intent has the answer, too, or has *refused* the key: then it never takes the items.
* A partition with a *part* of a call that was divided by its items' keys remembers where the rows of each slot are. A rebalance moves that
  with the slot, so the next home knows what is stored, however a repetition is divided.
"""

from __future__ import annotations

import heapq
import zlib
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from sluiceway.core.partition.key_slots import slot_of_name
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import GROUP_KEEP, MAX_GROUP_KEYS, MAX_KEYS, PLACED_LONGER
from sluiceway.model.peers import WHOLE, KeyPiece
from sluiceway.model.requests import MOVE_GROUP, TRANSFER_GROUP, Duplicates, ProduceKey

Role = Literal["", "t", "p"]
"""The first letter of the names of a role's records; that at the home follows. Where a slot's records are given to another partition, the
slot's number is between the two in those of parts, and `/`."""
HOME: Final = ""
PLACED: Final = "t"
PART: Final = "p"

MAX_SURE = 10_000


class SlotRows(NamedTuple):
    """Rows of a divided call that lie together, sorted by slot, from `first_offset` of `partition` on (None: of this one).

    `slots`: packed, each slot with the number of its rows. `duplicates`: packed, those of all these rows that were not stored, each with
    the place of the item that had its unique key.
    """

    first_offset: int
    slots: bytes
    partition: int | None = None
    duplicates: bytes = b""


class KeyResult(msgspec.Struct, array_like=True, frozen=True):
    """The first produce under a key: its content and where it went. `partition` None: into this one.

    `first_offset` None: the home's intent of `intended_at`, or (`count` 0) a target's refusal. `parts`: for a part, where its rows are; the
    digest is that of the whole call.
    """

    digest: bytes
    first_offset: int | None
    count: int
    partition: int | None = None
    intended_at: Millis = 0
    parts: tuple[SlotRows, ...] = ()

    @property
    def is_intent(self) -> bool:
        return self.first_offset is None


class KeyRecord(msgspec.Struct, array_like=True):
    """Either one key, remembered `until` a time, or a group with all keys of its current `sequence`, forgotten long after its last use.

    `until` 0: for ever, for the system's own groups and in records written before groups had an end.
    """

    seen: dict[str, KeyResult]
    sequence: int
    until: Millis


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(KeyRecord).decode


class KeyMemory:
    """A partition's key records. Pure; `touched` names the changed ones.

    Names of groups and of lone keys never collide: their record keys differ in the first letter.
    """

    def __init__(self) -> None:
        self.records: dict[str, KeyRecord] = {}
        self.touched: dict[str, None] = {}
        self.placed: dict[str, None] = {}
        """Records of this partition as a target that hold an answer: their homes rely on it."""
        self._ends: list[tuple[Millis, str]] = []
        self._sure: dict[tuple[str | None, str], KeyResult] = {}
        """Intents whose target is known to have nothing, with nothing on its way there."""

    def record(self, name: str) -> bytes | None:
        """The bytes to store; None if it is forgotten."""
        record = self.records.get(name)
        return None if record is None else pack(record)

    def load(self, name: str, data: bytes) -> None:
        record = self.records[name] = unpack(data)
        if record.until:
            heapq.heappush(self._ends, (record.until, name))
        self._file(name)

    def find(self, key: ProduceKey, role: Role = HOME) -> KeyResult | None:
        """Return what is remembered of this key in that role; None if it is new. Raises stale_sequence, too_many_requests,
        invalid_request."""
        record = self.records.get(_name(key, role))
        if record is None:
            if len(self.records) >= MAX_KEYS and _until(key, 1):
                raise SluicewayError("too_many_requests", f"the partition has its maximum of {MAX_KEYS} idempotency keys; try again later")
            return None
        if key.group is not None and key.sequence != record.sequence:
            if key.sequence < record.sequence:
                raise SluicewayError(
                    "stale_sequence",
                    f"idempotency_sequence: group {key.group!r} is already at sequence {record.sequence}, above {key.sequence}",
                    "idempotency_sequence",
                )
            return None
        seen = record.seen.get(key.key)
        if seen is None and len(record.seen) >= MAX_GROUP_KEYS:
            detail = f"group {key.group!r} has the maximum of {MAX_GROUP_KEYS} keys at sequence {key.sequence}; raise idempotency_sequence"
            raise SluicewayError("invalid_request", f"idempotency_group: {detail}", "idempotency_group")
        return seen

    def has(self, key: ProduceKey) -> bool:
        """Whether an answer or intent is remembered under this key."""
        return self._seen(key) is not None

    def _seen(self, key: ProduceKey) -> KeyResult | None:
        record = self.records.get(_name(key))
        return record.seen.get(key.key) if record is not None and record.sequence == key.sequence else None

    def remember(self, key: ProduceKey, seen: KeyResult, now: Millis, role: Role = HOME) -> None:
        """Record the key's answer or intent in that role."""
        name = _name(key, role)
        record = self.records.get(name)
        if record is None or record.sequence != key.sequence:
            record = self.records[name] = KeyRecord({}, key.sequence, record.until if record is not None else 0)
        until = _until(key, now)
        if until and role == PLACED:
            until += PLACED_LONGER
        if until and (record.until == 0 or key.group is not None):
            if record.until == 0:
                heapq.heappush(self._ends, (until, name))
            record.until = until
        record.seen[key.key] = seen
        self.touched[name] = None
        if role == PLACED:
            self._file(name)
        elif role == HOME:
            self.doubt(key)

    def forget_old(self, now: Millis, most: int = 1_000) -> None:
        """Drop lone keys whose window is over and unused groups, at most `most` per call."""
        for _ in range(most):
            if not self._ends or self._ends[0][0] > now:
                break
            name = heapq.heappop(self._ends)[1]
            until = self.records[name].until if name in self.records else 0
            if not until:
                continue  # The record went elsewhere, or came back, since this entry.
            if until > now:
                # Used again since this entry.
                heapq.heappush(self._ends, (until, name))
                continue
            self._drop(name)

    def _drop(self, name: str) -> None:
        del self.records[name]
        self.placed.pop(name, None)
        self.touched[name] = None

    def _file(self, name: str) -> None:
        if name.startswith(PLACED):
            if any(seen.count for seen in self.records[name].seen.values()):
                self.placed[name] = None
            else:
                self.placed.pop(name, None)

    # ---- intents of this partition's keys ---------------------------------------------------------------------

    def intend(self, key: ProduceKey, count: int, target: int, now: Millis) -> KeyResult:
        """Note `target` for the items of a new key, or of one whose intent is sure. Returns the intent."""
        seen = KeyResult(b"", None, count, target, now)
        self.remember(key, seen, now)
        self.be_sure(key, seen)
        return seen

    def is_sure(self, key: ProduceKey, intent: KeyResult) -> bool:
        """Whether the target of that intent surely has nothing, and will not get anything by it."""
        return self._sure.get(key.identity) is intent

    def be_sure(self, key: ProduceKey, intent: KeyResult) -> None:
        """Note that the target surely has nothing. Ignored unless the intent is the current one."""
        if self._seen(key) is intent:
            if len(self._sure) >= MAX_SURE:
                # These belong to abandoned calls. Being unsure is always safe.
                self._sure.clear()
            self._sure[key.identity] = intent

    def doubt(self, key: ProduceKey) -> None:
        """Forget that the intent was sure: from now on only the target knows."""
        self._sure.pop(key.identity, None)

    def digest_as_target(self, key: ProduceKey) -> bytes | None:
        """Digest of the body that this partition, as a target, has taken under the key; None if it has taken no items."""
        record = self.records.get(_name(key, PLACED))
        seen = record.seen.get(key.key) if record is not None and record.sequence == key.sequence else None
        return seen.digest if seen is not None and seen.count else None

    def settle(self, key: ProduceKey, intent: KeyResult, seen: KeyResult) -> None:
        """Note that the items are durable in the target. Not written by itself: the target remembers it."""
        if self._seen(key) is intent:
            self.records[_name(key)].seen[key.key] = seen
        self.doubt(key)

    # ---- handover between partitions --------------------------------------------------------------------------

    def of_slots(self, slots: Collection[int], of: int, partition: int, piece: KeyPiece = WHOLE) -> Iterator[tuple[str, bytes]]:
        """The records of these slots' keys in that piece, with `partition`, this one's number, filled in for others to read. One by one:
        all of them may be too many."""
        for name, record in self.records.items():
            if not _is_in(name, piece):
                continue
            if name.startswith(PART):
                yield from _by_slot(name, record, slots, partition)
            elif _is_of(name, slots, of):
                seen = {key: each if each.partition is not None else _in(each, partition) for key, each in record.seen.items()}
                yield name, pack(KeyRecord(seen, record.sequence, record.until))

    def replace(self, slots: Collection[int], of: int, given: Mapping[str, bytes], *, had_them: bool, piece: KeyPiece = WHOLE) -> None:
        """Replace the records of these slots' keys in that piece by the given ones. Windows keep their original end. `had_them`: this
        partition has known of keys of some of the slots before."""
        for name in [name for name in self.records if _is_of(name, slots, of) and _is_in(name, piece)]:
            del self.records[name]
            self.touched[name] = None
        if had_them:
            self._forget_parts(slots, piece)
        for name, data in given.items():
            if name.startswith(PART):
                self._add_part(PART + name.partition("/")[2], unpack(data))
            else:
                self.load(name, data)
                self.touched[name] = None

    def _forget_parts(self, slots: Collection[int], piece: KeyPiece) -> None:
        """Forget what is known in that piece of rows of these slots."""
        for name in [name for name in self.records if name.startswith(PART) and _is_in(name, piece)]:
            record = self.records[name]
            kept = {key: _without_slots(seen, slots) for key, seen in record.seen.items()}
            if all(kept[key] is seen for key, seen in record.seen.items()):
                continue
            record.seen = {key: seen for key, seen in kept.items() if seen.parts}
            if record.seen:
                self.touched[name] = None
            else:
                self._drop(name)

    def _add_part(self, name: str, given: KeyRecord) -> None:
        """Add what another partition knew of a slot. Of a group, only the keys of its current sequence are remembered."""
        record = self.records.get(name)
        if record is not None and record.sequence > given.sequence:
            return
        self.touched[name] = None
        if record is None or record.sequence < given.sequence:
            record = self.records[name] = KeyRecord({}, given.sequence, given.until)
        else:
            record.until = max(record.until, given.until) if record.until and given.until else 0
        if record.until:
            heapq.heappush(self._ends, (record.until, name))
        for key, seen in given.seen.items():
            mine = record.seen.get(key)
            # Joined as they are: a call may have had items for each slot, and these come one by one.
            both = None if mine is None else msgspec.structs.replace(mine, count=mine.count + seen.count, parts=mine.parts + seen.parts)
            record.seen[key] = both or seen

    def answers_as_target(self, partition: int, room: int) -> dict[str, bytes]:
        """The answers of this `partition` as a target, by the name at the home: as many as fit into `room` bytes, at least one record."""
        given: dict[str, bytes] = {}
        for name in self.placed:
            record = self.records[name]
            seen = {key: _in(each, partition) for key, each in record.seen.items() if each.count}
            data = pack(KeyRecord(seen, record.sequence, record.until))
            room -= len(name) + len(data)
            if given and room < 0:
                break
            given[name[len(PLACED) :]] = data
        return given

    def note_answers(self, given: Mapping[str, bytes]) -> None:
        """Take over durable answers of a target of this home's intents, so that nothing depends on that target any more."""
        for name, data in given.items():
            told, record = unpack(data), self.records.get(name)
            if record is None or record.sequence != told.sequence:
                continue  # Forgotten, or the group has moved on.
            for key, seen in told.seen.items():
                mine = record.seen.get(key)
                if mine is not None and mine.partition == seen.partition:
                    if mine.is_intent:
                        record.seen[key] = seen
                    # Also for known answers: `settle` has not written them, and the target is about to forget them.
                    self.touched[name] = None

    def forget_answers(self, names: Collection[str]) -> None:
        """Drop answers given as a target: their homes have noted them."""
        for name in names:
            if PLACED + name in self.records:
                self._drop(PLACED + name)


def _until(key: ProduceKey, now: Millis) -> Millis:
    if key.group is None:
        return now + key.window
    return 0 if key.group.startswith((TRANSFER_GROUP, MOVE_GROUP)) else now + GROUP_KEEP


def _in(seen: KeyResult, partition: int) -> KeyResult:
    return KeyResult(seen.digest, seen.first_offset, seen.count, partition)


def _is_of(name: str, slots: Collection[int], of: int) -> bool:
    """Whether that record belongs to one of these slots, by its idempotency key. Keys of moves stay with their partition, as do a target's
    records."""
    return not name.startswith((f"g{MOVE_GROUP}", PLACED, PART)) and slot_of_name(name[1:], of) in slots


def _is_in(name: str, piece: KeyPiece) -> bool:
    """Whether the record of that name is in the piece."""
    number, pieces = piece
    # Those of a slot have the same rest of this checksum: its high bits divide them further.
    return pieces == 1 or (zlib.crc32(name.encode()) >> 16) % pieces == number


def _name(key: ProduceKey, role: Role = HOME) -> str:
    return role + (f"k{key.key}" if key.group is None else f"g{key.group}")


def slot_of_given(name: str, of: int) -> int:
    """The slot of a record that was given under that name."""
    return int(name[1:].partition("/")[0]) if name.startswith(PART) else slot_of_name(name[1:], of)


# ---- parts of divided calls --------------------------------------------------------------------------------------------


class SlotPlace(NamedTuple):
    """Where a slot's rows are: they lie together from `first_offset` of `partition` (None: this one) on, but for `duplicates`, as in
    `Produced`."""

    slot: int
    first_offset: int
    rows: int
    partition: int | None
    duplicates: Duplicates = ()

    @property
    def end(self) -> int:
        """The offset behind the last row that is stored there."""
        return self.first_offset + self.rows - len(self.duplicates)


_DUPLICATE = np.dtype([("row", "<u4"), ("offset", "<u8")])


def slot_rows(first_offset: int, slots: Iterable[tuple[int, int]], duplicates: Duplicates = (), partition: int | None = None) -> SlotRows:
    """Rows stored in `partition`, from `first_offset` on: of each slot so many, but for `duplicates`."""
    left_out = np.array(list(duplicates), _DUPLICATE).tobytes() if duplicates else b""
    return SlotRows(first_offset, array("I", chain.from_iterable(slots)).tobytes(), partition, left_out)


def places_of(seen: KeyResult | None) -> dict[int, SlotPlace]:
    """Where the rows of each slot are, of a part."""
    return {} if seen is None else {place.slot: place for place in _split(seen)}


def _split(seen: KeyResult, among: Collection[int] | None = None) -> Iterator[SlotPlace]:
    """The rows of each slot; `among`: of those only."""
    for first, packed, partition, left_out in seen.parts:
        numbers, row = array("I", packed), 0
        duplicates: deque[tuple[int, int]] = deque(np.frombuffer(left_out, _DUPLICATE).tolist()) if left_out else deque()
        for slot, rows in zip(numbers[::2], numbers[1::2], strict=True):
            here: list[tuple[int, int]] = []
            while duplicates and duplicates[0][0] < row + rows:
                at, offset = duplicates.popleft()
                here.append((at - row, offset))
            if among is None or slot in among:
                yield SlotPlace(slot, first, rows, partition, tuple(here))
            first, row = first + rows - len(here), row + rows


def _without_slots(seen: KeyResult, slots: Collection[int]) -> KeyResult:
    if next(_split(seen, slots), None) is None:
        return seen
    kept = [each for each in _split(seen) if each.slot not in slots]
    parts = tuple(slot_rows(each.first_offset, ((each.slot, each.rows),), each.duplicates, each.partition) for each in kept)
    return msgspec.structs.replace(seen, count=sum(each.rows for each in kept), parts=parts)


def _by_slot(name: str, record: KeyRecord, slots: Collection[int], partition: int) -> Iterator[tuple[str, bytes]]:
    """The record of a part for each of these slots that it has rows of, by the name under which it is given."""
    found: dict[int, dict[str, KeyResult]] = {}
    for key, seen in record.seen.items():
        for slot, first, rows, there, duplicates in _split(seen, slots):
            part = slot_rows(first, ((slot, rows),), duplicates, partition if there is None else there)
            found.setdefault(slot, {})[key] = KeyResult(seen.digest, seen.first_offset, rows, seen.partition, parts=(part,))
    return ((f"{PART}{slot}/{name[1:]}", pack(KeyRecord(keys, record.sequence, record.until))) for slot, keys in found.items())
