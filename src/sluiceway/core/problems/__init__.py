"""What is wrong with queues, backends and instances: one judge, fed with samples, without clock or I/O."""

from __future__ import annotations
