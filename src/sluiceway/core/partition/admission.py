"""What a partition durably takes, whatever its owner knows of the queue: rebalances shut partitions, and move the homes of keys.

All of it is in the partition's header, so it is decided under the fence, and nothing else may remember it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from sluiceway.core.partition.idempotency_keys import KeyMemory
from sluiceway.core.partition.key_slots import slot, slot_of_name
from sluiceway.core.partition.transfers import TransferLog
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_KEYS_BYTES
from sluiceway.model.peers import Shutting
from sluiceway.model.requests import MOVE_GROUP, ProduceKey

SHUTTINGS: Final[tuple[Shutting, ...]] = ("open", "read_only", "sealed")
"""By the number that is stored; each further one takes less."""


class Admission(TransferLog):
    """A line with a memory of idempotency keys, of which it says what may come in."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = KeyMemory()

    @property
    def shutting(self) -> Shutting:
        return SHUTTINGS[self.header.shut]

    @property
    def is_empty(self) -> bool:
        """Nothing is ready, leased, scheduled or on its way."""
        return not self.extents and not self.dues

    def refuses(self, key: ProduceKey | None) -> bool:
        """Whether a produce must go elsewhere, or wait.

        Items that are moved come in until the partition is sealed: what was on its way to a partition when its rebalance was cancelled must
        arrive there, as nobody else can say whether it has. What it has taken of them, it says even then.
        """
        if key is not None and is_move(key):
            return self.header.shut == 2 and not self.keys.has(key)
        return bool(self.header.shut) or (key is not None and bool(self.header.closed_slots) and self._is_closed(key))

    def _is_closed(self, key: ProduceKey) -> bool:
        return self._is_closed_slot(slot(key, self.header.slots_of))

    def _is_closed_slot(self, place: int) -> bool:
        bits = self.header.closed_slots
        return place >> 3 < len(bits) and bool(bits[place >> 3] >> (place & 7) & 1)

    # ---- shut -------------------------------------------------------------------------------------------------

    def shut(self, shutting: Shutting, cursor: int) -> None:
        """Take so much from now on; sealed only if there is nothing, and no home of a key relies on its answers.

        Under the same cursor it is only shut further. Raises
        `version_conflict`."""
        self.follow_cursor(cursor)
        wanted, header = SHUTTINGS.index(shutting), self.header
        if wanted == 2 and not (self.is_empty and not self.keys.placed):
            wanted = header.shut
        if cursor == header.shut_cursor:
            wanted = max(wanted, header.shut)
        if (wanted, cursor) != (header.shut, header.shut_cursor):
            header.shut, header.shut_cursor = wanted, cursor
            self._changed = True

    def follow_cursor(self, cursor: int) -> None:
        """Refuse what a coordinator asks that is one no more, with `version_conflict`."""
        if cursor < self.header.shut_cursor:
            raise _outdated(cursor, self.header.shut_cursor)

    # ---- keys -------------------------------------------------------------------------------------------------

    def give_keys(self, slots: Iterable[int], of: int, cursor: int, partition: int) -> dict[str, bytes]:
        """Take no keys of these slots from now on. Returns what is remembered of them, as that of the `partition` that this is. Raises
        `version_conflict`, and `too_many_items` though the slots are closed."""
        header, chosen = self.header, frozenset(slots)
        if cursor < header.given_cursor or cursor <= header.taken_cursor:
            raise _outdated(cursor, max(header.given_cursor, header.taken_cursor))
        self._set_closed(self._bits(of) | _as_bits(chosen), of)
        header.given_cursor = cursor
        given = self.keys.of_slots(chosen, of, partition)
        if sum(len(name.encode()) + len(data) for name, data in given.items()) > MAX_KEYS_BYTES:
            raise SluicewayError("too_many_items", f"the keys of {len(chosen)} slots are more than {MAX_KEYS_BYTES} bytes")
        return given

    def take_keys(self, slots: Iterable[int], of: int, cursor: int, keys: Mapping[str, bytes] | None) -> None:
        """Take keys of these slots from now on, and remember these of theirs instead of any others; None: those that it remembers. Does
        nothing if it has taken that cursor, or has given or taken a higher one."""
        header, chosen = self.header, frozenset(slots)
        if cursor <= header.taken_cursor or cursor < header.given_cursor:
            return
        self._set_closed(self._bits(of) & ~_as_bits(chosen), of)
        header.taken_cursor = cursor
        if keys is not None:
            self.keys.replace(chosen, of, keys)

    def note_answers(self, keys: Mapping[str, bytes]) -> None:
        """Answers of a target of intents of this home. Raises `version_conflict` if another partition has become the home of one: only that
        must note it, before the target forgets it."""
        if self.header.closed_slots and any(self._is_closed_slot(slot_of_name(name[1:], self.header.slots_of)) for name in keys):
            raise SluicewayError("version_conflict", "another partition is the home of these keys now")
        self.keys.note_answers(keys)

    def forget_answers(self, names: Iterable[str], cursor: int) -> None:
        """Their homes have noted these answers. Raises `version_conflict`: if it takes items again, there may be more than was noted."""
        self.follow_cursor(cursor)
        if not self.header.shut:
            raise SluicewayError("version_conflict", "the partition takes items again")
        self.keys.forget_answers(tuple(names))

    def _bits(self, of: int) -> int:
        if self.header.closed_slots and self.header.slots_of != of:
            raise SluicewayError("version_conflict", f"the queue's keys have {self.header.slots_of} slots, not {of}")
        return int.from_bytes(self.header.closed_slots, "little")

    def _set_closed(self, bits: int, of: int) -> None:
        self.header.closed_slots = bits.to_bytes(-(-bits.bit_length() // 8), "little")
        self.header.slots_of = of
        self._changed = True


def is_move(key: ProduceKey) -> bool:
    """Whether items that come under it are moved between partitions of a queue."""
    return key.group is not None and key.group.startswith(MOVE_GROUP)


def _as_bits(slots: Iterable[int]) -> int:
    bits = 0
    for each in slots:
        bits |= 1 << each
    return bits


def _outdated(cursor: int, newest: int) -> SluicewayError:
    return SluicewayError("version_conflict", f"this was decided at {cursor} of the queue's rebalances, and {newest} has been carried out")
