"""An instance's own partitions: the driver of each queue, the backends, the rows. Asks no other instance."""

from __future__ import annotations
