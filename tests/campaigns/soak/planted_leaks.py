"""Leaks that are planted in a copy of the product's real code. A soak that does not find them finds nothing."""

from __future__ import annotations

from typing import Final

from tests.campaigns.blackbox.planted_bugs import Edit, PlantedBug
from tests.campaigns.soak.soak_record import FILES, HANDLES, MEMORY, PROCESSOR

_APP: Final = "server/app.py"
_STORE: Final = "adapters/storage/sqlite.py"
_STATE: Final = "        self._running: set[asyncio.Task[object]] = set()\n"
_ENDED: Final = "            self._running.discard(task)\n"

LEAKS: Final = (
    PlantedBug(
        "kept-requests",
        "Each request stays in a list when it is answered, with some kilobytes",
        (
            Edit(_APP, _STATE, f"{_STATE}        self._kept: list[tuple[Request, bytes]] = []\n"),
            Edit(_APP, _ENDED, f"{_ENDED}            self._kept.append((request, bytes(6_000)))\n"),
        ),
        (MEMORY,),
    ),
    PlantedBug(
        "open-files",
        "The file of a partition is not closed when its queue is deleted",
        (
            Edit(
                _STORE,
                "            file, self.file = self.file, None\n            file.close()\n",
                "            _NEVER_CLOSED.append(self.file)\n            self.file = None\n",
            ),
            Edit(_STORE, 'IDENTITY = "identity"\n', '_NEVER_CLOSED: list[PartitionFile] = []\nIDENTITY = "identity"\n'),
        ),
        (HANDLES,),
    ),
    PlantedBug(
        "left-files",
        "The files of a deleted queue's partitions stay",
        (Edit(_STORE, 'for suffix in ("-shm", "", "-journal", "-wal"):', "for suffix in ():"),),
        (FILES,),
    ),
    PlantedBug(
        "sorted-requests",
        "Each request sorts the times of all requests before it, as texts and with copies",
        (
            Edit(_APP, _STATE, f"{_STATE}        self._times: list[float] = []\n"),
            Edit(_APP, _ENDED, f"{_ENDED}            self._times = sorted([began, *self._times] * 4, key=str)[::4]\n"),
        ),
        (PROCESSOR,),
    ),
)
