"""Admission: a partition's durable rules of acceptance, whatever its owner knows. Rebalances shut partitions and move key homes, and have
a new home hold back items while the former one has earlier ones of their keys.

All of it is in the partition's header: it is decided under the fence, and no copy may exist elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from sluiceway.core.partition.idempotency_keys import KeyMemory
from sluiceway.core.partition.key_slots import slot, slot_of_name
from sluiceway.core.partition.segment_log import SegmentLog
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_KEYS_BYTES
from sluiceway.model.peers import WHOLE, KeyPiece, Shutting
from sluiceway.model.requests import MOVE_GROUP, CallPart, ProduceKey

SHUTTINGS: Final[tuple[Shutting, ...]] = ("open", "read_only", "sealed")
"""Indexed by the stored number; each further one takes less."""


class Admission:
    """What a partition accepts: decided by the header of its segment log, and by its keys."""

    def __init__(self, log: SegmentLog, keys: KeyMemory) -> None:
        self._log = log
        self._keys = keys

    @property
    def shutting(self) -> Shutting:
        return SHUTTINGS[self._log.header.shut]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is ready, leased, scheduled or in transfer, and no bundle needs its counts."""
        return not self._log.extents and not self._log.dues and not self._log.bundles

    def refuses(self, key: ProduceKey | None, part: CallPart | None = None) -> bool:
        """Whether a produce must go elsewhere, or wait. A part belongs where its items' keys are, whatever its idempotency key is.

        Moved items are accepted until the partition is sealed: items in transit when their rebalance was cancelled must arrive here, since
        no other partition can say whether they have. Even a sealed partition confirms moves that it has taken.
        """
        if key is not None and is_move(key):
            return self._log.header.shut == 2 and not self._keys.has(key)
        if self._log.header.shut or not self._log.header.closed_slots:
            return bool(self._log.header.shut)
        if part is not None:
            return any(self._is_closed_slot(place) for place, _ in part.slots)
        return key is not None and self._is_closed(key)

    def _is_closed(self, key: ProduceKey) -> bool:
        return self._is_closed_slot(slot(key, self._log.header.slots_of))

    def _is_closed_slot(self, place: int) -> bool:
        bits = self._log.header.closed_slots
        return place >> 3 < len(bits) and bool(bits[place >> 3] >> (place & 7) & 1)

    # ---- shutting ---------------------------------------------------------------------------------------------

    def shut(self, shutting: Shutting, cursor: int) -> None:
        """Restrict admission to the partition; it is sealed only if it is empty and no home of a key relies on its answers.

        Under the same cursor it can only be restricted further. Raises `version_conflict`.
        """
        self.follow_cursor(cursor)
        wanted, header = SHUTTINGS.index(shutting), self._log.header
        if wanted == 2 and not (self.is_empty and not self._keys.placed):
            wanted = header.shut
        if cursor == header.shut_cursor:
            wanted = max(wanted, header.shut)
        if (wanted, cursor) != (header.shut, header.shut_cursor):
            header.shut, header.shut_cursor = wanted, cursor
            self._log.changed = True

    def follow_cursor(self, cursor: int) -> None:
        """Refuse requests of a superseded coordinator with `version_conflict`."""
        if cursor < self._log.header.shut_cursor:
            raise _outdated(cursor, self._log.header.shut_cursor)

    # ---- keys -------------------------------------------------------------------------------------------------

    def give_keys(self, slots: Iterable[int], of: int, cursor: int, partition: int, piece: KeyPiece = WHOLE) -> dict[str, bytes]:
        """Stop taking keys of these slots and return their records in that piece, with `partition`, this one's number, filled in. Raises
        `version_conflict`; and `too_many_items`, although the slots are then closed."""
        header, chosen = self._log.header, frozenset(slots)
        if cursor < header.given_cursor or cursor <= header.taken_cursor:
            raise _outdated(cursor, max(header.given_cursor, header.taken_cursor))
        self._set_closed(self._bits(of) | _as_bits(chosen), of)
        header.given_cursor = cursor
        given, nbytes = dict[str, bytes](), 0
        for name, data in self._keys.of_slots(chosen, of, partition, piece):
            nbytes += len(name.encode()) + len(data)
            if nbytes > MAX_KEYS_BYTES:
                raise SluicewayError("too_many_items", f"the keys of {len(chosen)} slots are more than {MAX_KEYS_BYTES} bytes")
            given[name] = data
        return given

    def take_keys(
        self, slots: Iterable[int], of: int, cursor: int, keys: Mapping[str, bytes] | None, now: Millis = 0, *, waits: bool = False
    ) -> None:
        """Start taking keys of these slots, replacing their records by `keys` (None: keep the records). `waits`: hold their items back.
        Does nothing if it has taken that cursor, or has given or taken a higher one."""
        header, chosen = self._log.header, frozenset(slots)
        if cursor <= header.taken_cursor or cursor < header.given_cursor:
            return
        closed, taken = self._bits(of), _as_bits(chosen)
        self._set_closed(closed & ~taken, of)
        header.taken_cursor = cursor
        if waits:
            self._hold_back(self._held | taken, now)
        if keys is not None:
            self._keys.replace(chosen, of, keys, had_them=bool(closed & taken))

    def take_piece(self, slots: Iterable[int], of: int, cursor: int, keys: Mapping[str, bytes], piece: KeyPiece) -> None:
        """Replace the records of these slots in that piece by `keys`, before the slots are taken. Ignored as `take_keys` is."""
        header, chosen = self._log.header, frozenset(slots)
        if cursor <= header.taken_cursor or cursor < header.given_cursor:
            return
        # Closed until all are there. From now on pieces of earlier cursors, which may come late, are ignored.
        self._set_closed(self._bits(of) | _as_bits(chosen), of)
        header.given_cursor = cursor
        self._keys.replace(chosen, of, keys, had_them=True, piece=piece)

    def serve_slots(self, slots: Iterable[int], cursor: int, now: Millis) -> None:
        """Serve items with keys of these slots from now on. Raises `version_conflict`."""
        if cursor < self._log.header.taken_cursor:
            raise _outdated(cursor, self._log.header.taken_cursor)
        self._hold_back(self._held & ~_as_bits(slots), now)

    @property
    def _held(self) -> int:
        return int.from_bytes(self._log.header.held_slots, "little")

    def _hold_back(self, bits: int, now: Millis) -> None:
        self._log.header.held_slots = _as_bytes(bits)
        self._log.changed = True
        self._log.hold_back(now)

    def note_answers(self, keys: Mapping[str, bytes]) -> None:
        """Record answers of a target of this home's intents. Raises `version_conflict` if another partition has become the home of one:
        only that one must note it, before the target forgets it."""
        if self._log.header.closed_slots and any(self._is_closed_slot(slot_of_name(name[1:], self._log.header.slots_of)) for name in keys):
            raise SluicewayError("version_conflict", "another partition is now the home of these keys")
        self._keys.note_answers(keys)

    def forget_answers(self, names: Iterable[str], cursor: int) -> None:
        """Forget answers that their homes have noted. Raises `version_conflict` if the partition takes items again: there may be more than
        was noted."""
        self.follow_cursor(cursor)
        if not self._log.header.shut:
            raise SluicewayError("version_conflict", "the partition takes items again")
        self._keys.forget_answers(tuple(names))

    def _bits(self, of: int) -> int:
        if self._log.header.closed_slots and self._log.header.slots_of != of:
            raise SluicewayError("version_conflict", f"the queue's keys have {self._log.header.slots_of} slots, not {of}")
        return int.from_bytes(self._log.header.closed_slots, "little")

    def _set_closed(self, bits: int, of: int) -> None:
        self._log.header.closed_slots = _as_bytes(bits)
        self._log.header.slots_of = of
        self._log.changed = True


def is_move(key: ProduceKey) -> bool:
    """Whether items under this key are moved between partitions of a queue."""
    return key.group is not None and key.group.startswith(MOVE_GROUP)


def _as_bits(slots: Iterable[int]) -> int:
    bits = 0
    for each in slots:
        bits |= 1 << each
    return bits


def _as_bytes(bits: int) -> bytes:
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def _outdated(cursor: int, newest: int) -> SluicewayError:
    return SluicewayError("version_conflict", f"the request is outdated: it has rebalance cursor {cursor}, the partition is at {newest}")
