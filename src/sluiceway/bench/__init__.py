"""Floor 9: `sluiceway bench`. Every figure is a ratio within one run; absolute numbers only describe the machine.

The peers, and all other measurements, are in `bench/`, beside the package.
"""

from __future__ import annotations
