"""A later release for the campaign: this one, under another version, which understands one compatibility level more.

Whatever an instance sends or writes at the new level before the upgrade is finalized, this release refuses to read.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import sluiceway
from sluiceway.kernel.compatibility import NEWEST
from tests.server.server_process import COMMAND


class Release(NamedTuple):
    """A release of the server: its version, the newest level that it understands, and the command that starts it."""

    version: str
    newest: int
    command: Sequence[str]


THIS: Final = Release(sluiceway.__version__, NEWEST, COMMAND)
_LATER: Final = "99.0.0"


def later(folder: Path) -> Release:
    """Make the later release in that folder."""
    package = folder / "sluiceway"
    shutil.copytree(Path(sluiceway.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    _replace(package / "__init__.py", f'"{sluiceway.__version__}"', f'"{_LATER}"')
    _replace(package / "kernel" / "compatibility.py", f"NEWEST: Final = {NEWEST}", f"NEWEST: Final = {NEWEST + 1}")
    return Release(_LATER, NEWEST + 1, ["env", f"PYTHONPATH={folder}", *COMMAND])


def _replace(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text, f"{before} is not in {path}"
    path.write_text(text.replace(before, after))
