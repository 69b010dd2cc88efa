"""Measurements: peers, scale, Spark, the model of large clusters. Not in the wheel; `sluiceway.bench` has what `sluiceway bench` needs."""

from __future__ import annotations
