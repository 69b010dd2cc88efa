"""Complete jobs around a queue, restartable after a crash: see `docs/guides/jobs.md`."""

from __future__ import annotations

from sluiceway.spark.jobs.archive import archive
from sluiceway.spark.jobs.archive_files import verify
from sluiceway.spark.jobs.common import Place, Progress
from sluiceway.spark.jobs.copy import copy
from sluiceway.spark.jobs.ingest import ingest, watch
from sluiceway.spark.jobs.process import process
from sluiceway.spark.jobs.redrive_job import look, redrive
from sluiceway.spark.jobs.shape import Shape

__all__ = ["Place", "Progress", "Shape", "archive", "copy", "ingest", "look", "process", "redrive", "verify", "watch"]
