"""Worker processes: they run a user's handler on the items of a queue, as `sluiceway work` does.

`work("module:handler", Options(...))` blocks until SIGTERM or SIGINT. A program that has its handler at hand can also call `Consumer.run`,
which stops in the same way.
"""

from __future__ import annotations

from sluiceway.worker.supervisor import work
from sluiceway.worker.worker_options import Options

__all__ = ["Options", "work"]
