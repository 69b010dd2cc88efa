"""Bugs that are planted in a copy of the product's real code. A campaign that does not find them finds nothing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.server.server_process import COMMAND

SOURCE: Final = Path(__file__).resolve().parents[3] / "src" / "sluiceway"
KILLS: Final = ("kill",)
NONE: Final = ("none",)


class Edit(NamedTuple):
    """A text that a file of the product has exactly once, and what stands there instead."""

    file: str
    text: str
    instead: str


class PlantedBug(NamedTuple):
    name: str
    about: str
    edits: tuple[Edit, ...]
    found_as: tuple[str, ...]
    """How the kinds of the anomalies begin that name it."""
    faults: Sequence[str] = KILLS
    storage: str = "sqlite"


_MACHINE: Final = "core/partition/partition.py"
_LOADING: Final = "core/partition/queries.py"
_TRANSFERS: Final = "core/partition/transfers.py"
_POSTGRES: Final = "adapters/storage/postgres.py"
_END_OF_TRANSFER: Final = """\
        transfer = self._remove(number)
        if transfer is not None:
            positions = transfer.open_positions()
            if transfer.moves_to"""
_COPY: Final = """\
        if number in self.by_number and self.by_number[number].transfer == REDRIVEN:
            self.call_back(number)
            return
"""

BUGS: Final = (
    PlantedBug(
        "answered-early",
        "A call is answered before its transaction is committed",
        (
            Edit(
                "adapters/storage/sqlite.py",
                "        return await self._run(ref, job, on_loop=small and self._pace.is_quick)\n",
                "        asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(self._run(ref, job)))\n"
                "        return Outcome.DONE\n",
            ),
        ),
        ("lost postfix", "doubled", "resurrected"),
    ),
    PlantedBug(
        "not-flushed",
        "A commit does not ask PostgreSQL to flush its log",
        (
            Edit(
                _POSTGRES,
                "FROM locked), set_config('synchronous_commit', 'on', true)",
                "FROM locked), set_config('synchronous_commit', 'off', true)",
            ),
        ),
        # The owner mostly remembers what the storage has lost, and stops the partition.
        ("lost", "doubled", "resurrected", "leased twice", "wrong answer"),
        ("PostgreSQL killed",),
        "postgresql",
    ),
    PlantedBug(
        "two-owners",
        "An instance that was given up goes on, and the storage does not ask for its fence",
        (
            Edit(
                "cluster/group_member.py",
                "            lapsed = not self.holds\n",
                "            owned, lease_deadline = {**self._held, **owned}, lease_deadline + 3_600_000\n"
                "            lapsed = not self.holds\n",
            ),
            Edit(
                _POSTGRES,
                "fence_era = %b AND fence_grant = %b AND fence_opening = %b AND txn = %b\n    RETURNING id)",
                "(%b::int8 + %b::int8 + %b::int8 + %b::int8) IS NOT NULL\n    RETURNING id)",
            ),
        ),
        ("lost", "doubled", "resurrected", "leased twice", "books"),
        ("freeze", "kill"),
        "cluster-postgresql",
    ),
    PlantedBug(
        "forgotten-part",
        "Which items of a lease are completed is not loaded at a start",
        (Edit(_LOADING, "    settled = unpack_bits(record.settled)\n", "    settled = BitMap()\n"),),
        ("resurrected", "doubled"),
    ),
    PlantedBug(
        "impatient-timers",
        "Timers that are due within a second are taken as due",
        (Edit(_MACHINE, "(at := self.next_timer()) is None or at > now:", "(at := self.next_timer()) is None or at > now + 1_000:"),),
        ("leased twice", "early"),
        NONE,
    ),
    PlantedBug(
        "forgotten-keys",
        "Idempotency keys are not loaded at a start",
        (Edit(_LOADING, "            partition.keys.load(key, data)\n", "            continue\n"),),
        ("doubled",),
    ),
    PlantedBug(
        "ignored-delay",
        "The delay of a retry is ignored",
        (Edit(_MACHINE, "                return now + disposition.retry_after\n", "                return now\n"),),
        ("early",),
        NONE,
    ),
    PlantedBug(
        "overtaken-retry",
        "An item that waits for its retry does not hold up the later ones of its key",
        (Edit(_MACHINE, "expires_at, max_lease_size, is_back=True)", "expires_at, max_lease_size, is_back=False)"),),
        ("out of order",),
        NONE,
    ),
    PlantedBug(
        "copied-redrive",
        "A redrive copies dead items, and leaves them in the dead queue",
        (Edit(_TRANSFERS, _END_OF_TRANSFER, _COPY + _END_OF_TRANSFER),),
        ("doubled",),
        NONE,
    ),
    PlantedBug(
        "dropped-dead",
        "An item that dies alone does not reach the dead queue",
        (
            Edit(
                _MACHINE,
                "        if self.keeps_dead:\n            transfer = self.transfers.begin(by_part(lease, positions), reason",
                "        if self.keeps_dead and len(positions) > 1:\n"
                "            transfer = self.transfers.begin(by_part(lease, positions), reason",
            ),
        ),
        ("lost",),
        NONE,
    ),
    PlantedBug(
        "generous-count",
        "Completing a part of a lease counts all of its items",
        (
            Edit(
                _MACHINE,
                "            self.log.header.completed += len(positions)\n",
                "            self.log.header.completed += lease.count\n",
            ),
        ),
        ("books",),
        NONE,
    ),
)


def plant(bug: PlantedBug, folder: Path) -> list[str]:
    """Make a copy of the product with that bug in the folder; the command that starts it. Raises AssertionError if a text that is to be
    replaced is not there exactly once."""
    package = folder / "sluiceway"
    # With what is compiled, which saves the first start some seconds.
    shutil.copytree(SOURCE, package)
    for edit in bug.edits:
        replace(package / edit.file, edit.text, edit.instead)
    return started_from(folder)


def replace(path: Path, text: str, instead: str) -> None:
    """Raises AssertionError if the text is not there exactly once."""
    source = path.read_text()
    assert source.count(text) == 1, f"{path} has this {source.count(text)} times: {text}"
    path.write_text(source.replace(text, instead))


def started_from(folder: Path) -> list[str]:
    """The command that starts the copy of the product in that folder."""
    return ["env", f"PYTHONPATH={folder}", *COMMAND]
