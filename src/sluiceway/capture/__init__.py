"""Change capture: several processes divide a change stream's partitions, and hand their records on to a queue, each exactly once.

Every process runs a member (`run_member`) with the same `CaptureConfig`; `look` reports their progress.
docs/project/tasks.md has the protocol.
"""

from __future__ import annotations

from sluiceway.capture.capture_process import check, run_member
from sluiceway.capture.capture_view import Forgotten, Look, captures, forget, look, there_is
from sluiceway.capture.config import CaptureConfig
from sluiceway.capture.member_parts import open_stream
from sluiceway.capture.partition_reader import Claim, Handler
from sluiceway.capture.registration import Begun
from sluiceway.capture.task_driver import TaskRunner
from sluiceway.capture.timing import Timing

__all__ = [
    "Begun",
    "CaptureConfig",
    "Claim",
    "Forgotten",
    "Handler",
    "Look",
    "TaskRunner",
    "Timing",
    "captures",
    "check",
    "forget",
    "look",
    "open_stream",
    "run_member",
    "there_is",
]
