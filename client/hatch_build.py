"""The client's distributions take their rooms from the one source tree: `../src` in the repository, `src` in a source distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Rooms(BuildHookInterface):  # type: ignore[type-arg]
    """One build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        source = root / "src" if (root / "src").is_dir() else root.parent / "src"
        inside = "src/sluiceway" if self.target_name == "sdist" else "sluiceway"
        for room in self.config["rooms"]:
            build_data["force_include"][str(source / "sluiceway" / room)] = f"{inside}/{room}"
