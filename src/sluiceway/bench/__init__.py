"""Floor 6: measuring. Every figure is a ratio within one run; absolute numbers only describe the machine."""

from __future__ import annotations
