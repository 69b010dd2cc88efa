"""Floor 6: `sluiceway bench`. Every figure is a ratio within one run; absolute numbers only describe the machine.

The peers, and what else is measured, are in `bench/`, beside the package.
"""

from __future__ import annotations
