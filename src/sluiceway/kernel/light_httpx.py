"""To be imported before httpx, which imports its own command line: that takes longer than all the rest, and nothing here needs it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast

sys.modules.setdefault("httpx._main", cast(ModuleType, None))
