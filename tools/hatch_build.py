"""Before a wheel or a source distribution is built: what the dashboard has from others is fetched, so that it is inside."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FetchAssets(BuildHookInterface):  # type: ignore[type-arg]
    """One build; it fails if a package is not to be had."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, str(Path(self.root) / "tools"))
        import assets

        assets.fetch_all("src/")
