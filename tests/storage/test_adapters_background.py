"""Work that goes on when its callers give up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import pytest

from sluiceway.adapters.background import shielded
from sluiceway.adapters.meta.bucket import BucketMetaStore
from sluiceway.testing.drive import driven
from tests.storage.test_bucket_faults import Seam


def complaints() -> list[dict[str, Any]]:
    """What the event loop would log from now on."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


async def give_up(call: asyncio.Task[Any]) -> None:
    """Cancel it as soon as it waits."""
    await asyncio.sleep(0)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


@driven
async def test_who_waits_gets_the_result_or_the_error() -> None:
    async def work(error: Exception | None) -> int:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return 7

    assert await shielded(asyncio.create_task(work(None))) == 7
    with pytest.raises(ZeroDivisionError):
        await shielded(asyncio.create_task(work(ZeroDivisionError())))


@driven
async def test_an_error_that_nobody_waits_for_any_more_is_not_logged() -> None:
    logged = complaints()
    may_go_on, ended = asyncio.Event(), []

    async def work() -> None:
        await may_go_on.wait()
        ended.append(True)
        raise ZeroDivisionError

    task = asyncio.create_task(work())
    await give_up(asyncio.create_task(shielded(task)))
    may_go_on.set()
    await asyncio.wait([task])
    del task
    gc.collect()
    assert ended
    assert not logged


@driven
async def test_a_commit_that_was_given_up_and_conflicts_is_not_logged() -> None:
    store = BucketMetaStore(Seam())
    await store.commit(puts={"key": b"0"})
    logged = complaints()
    await give_up(asyncio.create_task(store.commit({"key": None}, puts={"key": b"1"})))
    # It is carried out before the next one.
    await store.commit(puts={"other": b""})
    gc.collect()
    assert (await store.read(["key"])).entries["key"].value == b"0"
    assert not logged
