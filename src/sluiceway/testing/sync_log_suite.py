"""Conformance suite of SyncLog."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

from sluiceway.ports.sync_log import SyncLog
from sluiceway.testing.drive import driven

OpenLog = Callable[[], AbstractAsyncContextManager[SyncLog]]
"""Opens the test's log for the duration of a block, over its own connection; each call opens another on the same data."""
Entries = list[tuple[int, bytes]]

LONG = 100_000
"""Milliseconds to wait for an event that is immediate: a test that needs all of them has failed."""
LARGE = 1_000_000
"""Bytes of a record that every log must accept. A snapshot of 2,000 partitions has a third of that."""


async def read_all(log: SyncLog, after: int = 0, limit: int = 1_000) -> Entries:
    """Read all records after that number, page by page."""
    found: Entries = []
    while True:
        page = await log.read(after, limit)
        assert len(page.entries) <= limit
        assert page.first >= 1
        found += page.entries
        after = page.entries[-1][0] if page.entries else after
        if after >= page.end:
            check_order(found)
            return found
        assert page.entries, f"the log ends with {page.end}, and nothing is shown after {after}"


async def follow(log: SyncLog, enough: Callable[[Entries], bool], limit: int = 1_000) -> Entries:
    """Follow the log from the beginning until `enough`."""
    found: Entries = []
    while not enough(found):
        after = found[-1][0] if found else 0
        await log.wait(after, LONG)
        page = await log.read(after, limit)
        assert page.first <= after + 1, "nothing was trimmed"
        found += page.entries
    check_order(found)
    return found


def check_order(entries: Sequence[tuple[int, bytes]]) -> None:
    """Check that the numbers are positive and rise."""
    numbers = [number for number, _ in entries]
    assert numbers == sorted(set(numbers)), "numbers rise"
    assert not numbers or numbers[0] >= 1


def records(name: str, count: int) -> list[bytes]:
    return [b"%s %d" % (name.encode(), number) for number in range(count)]


def of(name: str, entries: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """Records of that author, in the order of the log."""
    return [record for _, record in entries if record.startswith(name.encode() + b" ")]


class SyncLogSuite:
    """Conformance suite. Needs a fixture `open_log` that returns a function without arguments: an async context manager around a log."""

    too_large = (1 << 20) + 1
    """Bytes of a record that this log refuses."""

    # Appending and reading

    @driven
    async def test_a_new_log_is_empty(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            assert await log.read(0) == (1, (), 0)
            assert await log.read(7) == (1, (), 0)

    @driven
    async def test_what_was_appended_is_there_in_its_order(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            await log.append([b"\x00\xff\n", b"two"])
            await log.append([b"two"])
            page = await log.read(0)
            assert [record for _, record in page.entries] == [b"\x00\xff\n", b"two", b"two"]
            assert page.first == 1
            assert page.end == page.entries[-1][0]
            assert await read_all(log) == list(page.entries)

    @driven
    async def test_nothing_appended_is_nothing(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            await log.append([])
            assert await log.read(0) == (1, (), 0)

    @driven
    async def test_reading_goes_on_after_any_number_by_pages_of_any_size(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            await log.append(records("a", 137))
            whole = await read_all(log)
            assert [record for _, record in whole] == records("a", 137)
            for at in (1, 2, 8, 9, 10, 11, 98, 99, 100, 101, 136, 137):
                assert await read_all(log, whole[at - 1][0]) == whole[at:]
            for limit in (1, 2, 7, 10):
                assert await read_all(log, whole[120][0], limit) == whole[121:]
            for limit in (50, 100, 136, 137, 138):
                assert await read_all(log, 0, limit) == whole
                assert await read_all(log, whole[5][0], limit) == whole[6:]

    @driven
    async def test_another_opening_sees_what_was_appended_before_it_asked(self, open_log: OpenLog) -> None:
        async with open_log() as one, open_log() as two:
            for number in range(12):
                await (one, two)[number % 2].append([b"%d" % number])
                for log in (two, one):
                    assert [record for _, record in (await log.read(0)).entries] == [b"%d" % n for n in range(number + 1)]
        async with open_log() as log:
            assert len(await read_all(log)) == 12

    @driven
    async def test_a_log_opened_again_goes_on(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            await log.append(records("a", 3))
            before = await read_all(log)
        async with open_log() as log:
            await log.append(records("b", 2))
            assert (await read_all(log))[:3] == before
            assert of("b", await read_all(log, before[-1][0])) == records("b", 2)

    @driven
    async def test_many_records_at_once(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            await log.append(records("a", 2_345))
            assert of("a", await read_all(log)) == records("a", 2_345)

    @driven
    async def test_large_records(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            large = [bytes([number]) * LARGE for number in range(3)]
            await log.append([b"before", large[0], large[1], b"between", large[2], b"after"])
            expected = [b"before", large[0], large[1], b"between", large[2], b"after"]
            assert [record for _, record in await read_all(log)] == expected

    @driven
    async def test_a_record_that_is_too_large_is_refused_with_all_that_goes_with_it(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            with pytest.raises(ValueError, match="record"):
                await log.append([b"before", bytes(self.too_large), b"after"])
            assert await read_all(log) == []
            await log.append([b"more"])
            assert [record for _, record in await read_all(log)] == [b"more"]

    # Several at once

    @driven
    async def test_whoever_appends_and_whoever_reads_all_see_one_order_without_gaps(self, open_log: OpenLog) -> None:
        authors, each = 6, 15
        async with AsyncExitStack() as stack:
            logs = [await stack.enter_async_context(open_log()) for _ in range(4)]

            async def write(author: int) -> None:
                sizes = itertools.cycle([1, 3, 2])
                left = records(f"w{author}", each)
                while left:
                    size = next(sizes)
                    await logs[author % len(logs)].append(left[:size])
                    left = left[size:]

            def enough(entries: Entries) -> bool:
                return len(entries) >= authors * each

            reading = [asyncio.create_task(follow(log, enough, limit)) for log, limit in zip(logs, (1_000, 1, 5, 30), strict=True)]
            await asyncio.gather(*(write(author) for author in range(authors)))
            seen = await asyncio.gather(*reading)
            assert seen[0] == await read_all(logs[0])
            assert all(entries == seen[0] for entries in seen)
            assert len(seen[0]) == authors * each
            for author in range(authors):
                assert of(f"w{author}", seen[0]) == records(f"w{author}", each)

    @driven
    async def test_an_append_that_nobody_waits_for_any_more_is_there_once_or_not_at_all(self, open_log: OpenLog) -> None:
        async with open_log() as log, open_log() as other:
            for steps in range(12):
                appending = asyncio.create_task(log.append([b"given up %d" % steps]))
                for _ in range(steps):
                    await asyncio.sleep(0)
                appending.cancel()
                await asyncio.wait([appending])
                await log.append([b"kept %d" % steps])
            # Late appends have arrived by then, and it would be no error if they had not.
            await other.append([b"last 0"])
            entries = await read_all(other)
            assert of("kept", entries) == records("kept", 12)
            given_up = [record for _, record in entries if record.startswith(b"given up")]
            assert len(given_up) == len(set(given_up))

    # Waiting

    @driven
    async def test_a_wait_ends_when_its_time_is_over(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            await log.wait(0, 0)
            await log.wait(0, 50)
            await log.append([b"one"])
            await log.wait((await log.read(0)).end, 50)

    @driven
    async def test_a_wait_for_what_is_there_already_ends_at_once(self, open_log: OpenLog) -> None:
        async with open_log() as log, open_log() as other:
            await log.append(records("a", 2))
            await log.wait(0, LONG)
            await other.wait(0, LONG)
            end = (await other.read(0)).end
            await log.append([b"more"])
            await log.wait(end, LONG)
            await other.wait(end, LONG)

    @driven
    async def test_a_wait_ends_when_another_opening_appends(self, open_log: OpenLog) -> None:
        async with open_log() as log, open_log() as other:
            end = 0
            for number in range(4):
                waiting = [asyncio.create_task(log.wait(end, LONG)) for _ in range(2)]
                for _ in range(number):
                    await asyncio.sleep(0)
                await other.append([b"%d" % number])
                await asyncio.gather(*waiting)
                end = (await log.read(end)).end

    # Trimming

    @driven
    async def test_what_was_trimmed_is_missing_at_the_beginning_and_nowhere_else(self, open_log: OpenLog) -> None:
        async with open_log() as log, open_log() as other:
            await log.append(records("a", 30))
            whole = await read_all(log)
            upto = whole[11][0]
            await other.read(0)
            await log.trim(upto)
            for each in (log, other):
                page = await each.read(0)
                assert page.first <= upto + 1
                left = [entry for entry in whole if entry[0] >= page.first]
                assert list(page.entries) == left
                assert left[-18:] == whole[12:]
                assert page.end == whole[-1][0]
                assert (await each.read(whole[20][0])).entries == tuple(whole[21:])
                assert (await each.read(whole[20][0])).first == page.first

    @driven
    async def test_a_log_of_which_everything_was_trimmed_goes_on_counting(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            await log.append(records("a", 5))
            end = (await log.read(0)).end
            await log.trim(end)
            page = await log.read(0)
            assert page.end == end
            assert page.first <= end + 1
        async with open_log() as log:
            await log.append([b"b 0"])
            entries = (await log.read(0)).entries
            assert entries[-1][1] == b"b 0"
            assert entries[-1][0] > end

    @driven
    async def test_trimming_again_or_less_or_more_than_there_is_takes_nothing_else(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            await log.trim(0)
            await log.append(records("a", 10))
            whole = await read_all(log)
            for upto in (whole[4][0], whole[4][0], whole[1][0], 0):
                await log.trim(upto)
                assert (await read_all(log))[-5:] == whole[5:]
            await log.trim(whole[-1][0])
            await log.append([b"b 0"])
            assert of("b", await read_all(log)) == [b"b 0"]

    @driven
    async def test_a_long_log_is_trimmed(self, open_log: OpenLog) -> None:
        async with open_log() as log, open_log() as other:
            await log.append(records("a", 2_500))
            whole = await read_all(log)
            await asyncio.gather(log.trim(whole[2_399][0]), other.trim(whole[1_999][0]))
            assert (await read_all(other))[-100:] == whole[2_400:]

    @driven
    async def test_who_reads_while_others_append_and_trim_misses_nothing_unknowingly(self, open_log: OpenLog) -> None:
        async with open_log() as log, open_log() as trimmer, open_log() as reader:
            count = 60
            found: Entries = []
            missed = 0

            async def write() -> None:
                for record in records("a", count):
                    await log.append([record])

            async def trim() -> None:
                done = 0
                while done < count:
                    await trimmer.wait(done, LONG)
                    done = (await trimmer.read(done)).end
                    await trimmer.trim(done - 3)

            async def read() -> None:
                nonlocal missed
                after = 0
                while of("a", found)[-1:] != [b"a %d" % (count - 1)]:
                    await reader.wait(after, LONG)
                    page = await reader.read(after, 4)
                    if page.first > after + 1:
                        missed += 1
                    elif page.entries and found:
                        last = int(found[-1][1].split()[1])
                        assert int(page.entries[0][1].split()[1]) == last + 1
                    found.extend(page.entries)
                    after = page.entries[-1][0] if page.entries else max(after, page.first - 1)

            await asyncio.gather(write(), trim(), read())
            check_order(found)
            numbers = [int(record.split()[1]) for _, record in found]
            assert sum(1 for one, two in itertools.pairwise(numbers) if two != one + 1) <= missed
