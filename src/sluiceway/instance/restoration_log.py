"""Log of a restore: the partitions that it has begun outside of its own folder, so that a repeat can remove what a killed one has left."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import msgspec

from sluiceway.adapters.disk import write_durably
from sluiceway.model.changes import Fence, PartitionRef
from sluiceway.ports.partition_store import FencedError, PartitionStore

FILE: Final = "restoring.log"


class _Begun(msgspec.Struct, frozen=True):
    """The first line. `fence`: under which the partitions are written. `storage`: the identity of each backend's storage."""

    fence: Fence
    storage: dict[str, str]


class _Partition(msgspec.Struct, frozen=True):
    """Each further line."""

    backend: str
    ref: PartitionRef


class RestorationLog:
    """The log in a restore's folder. Methods raise OSError."""

    def __init__(self, folder: Path, begun: _Begun, partitions: list[_Partition]) -> None:
        self._path = folder / FILE
        self._begun, self._partitions = begun, partitions

    @classmethod
    def begin(cls, folder: Path, fence: Fence, storage: dict[str, str]) -> Self:
        """Begin a log."""
        log = cls(folder, _Begun(fence, storage), [])
        log._write()
        return log

    @classmethod
    def left_in(cls, folder: Path) -> Self | None:
        """The log that is in the folder; None: there is none."""
        try:
            first, *lines = (folder / FILE).read_text().split("\n")
        except FileNotFoundError:
            return None
        # What follows the last line break was not noted before the power went, and so not begun.
        return cls(folder, msgspec.json.decode(first, type=_Begun), [msgspec.json.decode(line, type=_Partition) for line in lines[:-1]])

    @property
    def backends(self) -> set[str]:
        """The backends of the partitions that it has begun."""
        return {each.backend for each in self._partitions}

    def add(self, backend: str, ref: PartitionRef) -> None:
        """Note, durably, that the partition is about to be written."""
        self._partitions.append(_Partition(backend, ref))
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(self._partitions[-1]) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def clear(self) -> None:
        """Note that the partitions have been removed."""
        self._partitions = []
        self._write()

    async def remove_partitions(self, stores: Mapping[str, PartitionStore]) -> None:
        """Remove the partitions from those stores that are still the same storage, unless another owner has opened them since. Raises
        StoreUnavailableError, DamagedError."""
        # Before it is used: no fence is given twice, should this be interrupted as well.
        fence = self._begun.fence._replace(opening=self._begun.fence.opening + 1)
        self._begun = _Begun(fence, self._begun.storage)
        self._write()
        same = {name for name, store in stores.items() if await store.identify(None) == self._begun.storage[name]}
        for backend, ref in ((each.backend, each.ref) for each in self._partitions if each.backend in same):
            try:
                await stores[backend].open(ref, fence)
            except FencedError:
                continue
            await stores[backend].drop(ref)
        self.clear()

    def _write(self) -> None:
        lines = (msgspec.json.encode(each).decode() + "\n" for each in (self._begun, *self._partitions))
        write_durably(self._path, "".join(lines), private=True)
