"""Capture process: runs a member of a capture."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from sluiceway.adapters import system
from sluiceway.capture.alarms import AlarmBoard
from sluiceway.capture.config import CaptureConfig
from sluiceway.capture.member_parts import client_of, open_election, open_log, open_positions, open_sink, open_stream, opened
from sluiceway.capture.partition_reader import Habits, Handler, PartitionReader
from sluiceway.capture.registration import agreed, find_begun, note
from sluiceway.capture.task_driver import TaskRunner
from sluiceway.capture.timing import Timing
from sluiceway.core.group.task_member import Pace
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.names import check_queue_name
from sluiceway.ports.change_stream import ChangeStream
from sluiceway.ports.meta_store import MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.ports.position_store import PositionStore

log = logging.getLogger(__name__)

BEGIN_FOR: Millis = 60_000
"""Timeout of a starting member for an unreachable meta store."""
_AGAIN: Millis = 1_000
"""Milliseconds between two attempts."""


async def check(config: CaptureConfig) -> None:
    """Check a configuration before a member runs: the meta store opens, the registration matches, and the queue exists.

    A server that is unreachable, or does not tell, is no fault, since it may do so later. Raises SluicewayError.
    """
    async with opened(config.meta) as store:
        begun, _ = await find_begun(store, config.name)
        agreed(begun, config)
    if not config.queue:
        return
    async with client_of(config, "1s") as client:
        try:
            await client.queue_info(config.queue)
        except SluicewayError as error:
            # A key that may produce may lack the right to read.
            if error.code in ("queue_not_found", "unauthenticated"):
                raise


async def run_member(
    config: CaptureConfig,
    *,
    stop: asyncio.Event,
    name_hint: str = "member",
    handler: Callable[[ChangeStream, PositionStore], Handler] | None = None,
    watch: Callable[[TaskRunner], None] | None = None,
    pace: Pace | None = None,
    timing: Timing | None = None,
) -> None:
    """Take part in the capture until `stop` is set, then leave in order. Any number of members may run, in any number of processes.

    `handler` makes, from the member's own stream and position store, the reader of partitions that replaces handing records on to the
    queue. `watch` receives the runner before it begins. If cancelled, the member goes without leaving: others take over once it is
    considered dead. Raises SluicewayError for a wrong configuration, and if the meta store is unreachable for BEGIN_FOR at the start; later
    it waits for whatever is unreachable.
    """
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened(config.meta))
        stream = open_stream(config.stream, config.name, config.options)
        stack.push_async_callback(stream.close)
        positions = open_positions(config.name, store)
        if handler is None:
            sink = await stack.enter_async_context(open_sink(config))
            reads: Handler = PartitionReader(stream, positions, sink, Habits(limit=config.limit)).read
        else:
            reads = handler(stream, positions)
        if not await _begin(config, store, stop):
            return
        log = open_log(config.name, config.log, store)
        stack.push_async_callback(log.close)
        runner = TaskRunner(
            # A name is never reused, so each start adds a unique part.
            f"{check_queue_name(name_hint, 'name_hint')}-{system.new_incarnation()}",
            log=log,
            election=open_election(config.name, config.log, store),
            positions=positions,
            stream=stream,
            handler=reads,
            preset=config.preset,
            pace=pace,
            timing=timing,
            board=AlarmBoard(store, config.name),
        )
        if watch is not None:
            watch(runner)
        await _run_until(runner, stop)


async def _run_until(runner: TaskRunner, stop: asyncio.Event) -> None:
    running, asked = asyncio.ensure_future(runner.run()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            runner.stop()
        await running
    finally:
        asked.cancel()
        running.cancel()
        await asyncio.wait((running,))


async def _begin(config: CaptureConfig, store: MetaStore, stop: asyncio.Event) -> bool:
    """Register the capture's settings, or refuse contradicting ones. False: stopped before that."""
    until = system.steady() + BEGIN_FOR
    while not stop.is_set():
        try:
            await note(config, store)
            return True
        except (StoreUnavailableError, MetaUnknownError) as error:
            if system.steady() >= until:
                raise SluicewayError("unavailable", str(error)) from error
            log.warning("capture %s cannot start yet: %s", config.name, error)
        await system.wait(stop, _AGAIN)
    return False
