"""The memory that makes a produce repeatable: which keys this partition has seen, and what it answered."""

from __future__ import annotations

from itertools import islice

import msgspec

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import KEY_WINDOW, MAX_KEYS
from sluiceway.model.requests import ProduceKey


class Seen(msgspec.Struct, array_like=True, frozen=True):
    """The first produce under a key: what it said and where it went."""

    digest: bytes
    first_offset: int
    count: int


class KeyRecord(msgspec.Struct, array_like=True):
    """Either one key with a window (`group` None), or a group with all keys of its present `sequence`."""

    seen: dict[str, Seen]
    sequence: int
    at: Millis


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(KeyRecord).decode


class KeyMemory:
    """Pure; says which records changed by `touched`.

    A group's name and a lone key never meet: their record keys differ in the first letter.
    """

    def __init__(self) -> None:
        self.records: dict[str, KeyRecord] = {}
        self.touched: dict[str, None] = {}
        self._by_age: dict[str, Millis] = {}

    def load(self, name: str, data: bytes) -> None:
        self.records[name] = unpack(data)

    def loaded(self) -> None:
        """All records are there: put the lone keys in the order of their age."""
        lone = [(record.at, name) for name, record in self.records.items() if name[0] == "k"]
        self._by_age = {name: at for at, name in sorted(lone)}

    def find(self, key: ProduceKey, digest: bytes) -> Seen | None:
        """What was answered under this key; None if it is new. Raises key_conflict, stale_sequence, too_many_requests."""
        record = self.records.get(_name(key))
        if record is None:
            if len(self.records) >= MAX_KEYS:
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
        if seen is not None and seen.digest != digest:
            raise SluicewayError("key_conflict", f"idempotency_key: {key.key!r} was used for other items", "idempotency_key")
        return seen

    def remember(self, key: ProduceKey, seen: Seen, now: Millis) -> None:
        name = _name(key)
        record = self.records.get(name)
        if record is None or record.sequence != key.sequence:
            record = self.records[name] = KeyRecord({}, key.sequence, now)
            if key.group is None:
                self._by_age[name] = now
        record.seen[key.key] = seen
        self.touched[name] = None

    def forget_old(self, now: Millis, most: int = 1_000) -> None:
        """Drop lone keys whose window is over, a bounded number a call."""
        for name in list(islice(self._by_age, most)):
            if self._by_age[name] + KEY_WINDOW > now:
                break
            del self._by_age[name], self.records[name]
            self.touched[name] = None


def _name(key: ProduceKey) -> str:
    return f"k{key.key}" if key.group is None else f"g{key.group}"
