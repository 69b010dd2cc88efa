"""`sluiceway` whose partition stores note what they are asked and answer, and lose some of the answers.

`python -m tests.spec.recorded_server FILE LOST FLAW serve …`: into that file; of that part of the commits; with that flaw of
`sabotaged_server` below, or none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sluiceway.cli.main import main
from sluiceway.instance import service
from sluiceway.local import stores
from sluiceway.model.backends import BackendSettings
from spec.recording_store import HistoryFile, RecordingStore
from tests.campaigns.kit.sabotaged_server import SABOTAGES


def record(path: Path, lost: float) -> None:
    """Have all stores that are opened from now on write to the file."""
    honest, file = stores.open_store, HistoryFile(path)

    def open_store(name: str, settings: BackendSettings, data: Path, **options: Any) -> RecordingStore:
        return RecordingStore(honest(name, settings, data, **options), file.note, lost)

    setattr(service, "open_store", open_store)  # noqa: B010 - a type checker would take it for a mistake


if __name__ == "__main__":
    record(Path(sys.argv.pop(1)), float(sys.argv.pop(1)))
    if (flaw := sys.argv.pop(1)) != "none":
        SABOTAGES[flaw]()
    main()
