"""Conformance suite of MetaStore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from random import Random

import pytest

from sluiceway.ports.meta_store import MAX_COMMIT_BYTES, MAX_COMMIT_KEYS, NOTHING, ConflictError, Entry, MetaStore, Stamp, View
from sluiceway.testing.drive import Opened, OpenStore, driven, with_store

PREFIXES = ["q/", "%", "_", "a%", "a_", "\\", "é", "e", "\ud7ff", "\U0010ffff", "ab", "AB", "'", "a\x7f", "*", "["]
"""Prefixes that would trip a pattern language, a collation or a wrong upper bound."""

NEIGHBOURS = ["A", "a", "ac", "b", "éx", "d", "f", "\ue000", "\U0010fffe", "~", "q", "q0", "p/"]


def check_visible_in_order(views: Sequence[View], stamps: set[Stamp]) -> None:
    """Check that a view shows exactly the commits up to its stamp, each of which puts one key of its own. `stamps`: of all commits."""
    for view in views:
        assert {entry.stamp for entry in view.entries.values()} == {stamp for stamp in stamps if stamp <= view.stamp}


async def next_hint(watching: AsyncIterator[Stamp], at_least: Stamp) -> Stamp:
    """Return the first hint with a stamp of at least `at_least`."""
    async for stamp in watching:
        if stamp >= at_least:
            return stamp
    raise AssertionError("the watch ended")


class MetaStoreSuite:
    """Conformance suite. Its fixture `open_store` returns an async function without arguments that opens a store on the test's data."""

    fetches_changes = True
    """Whether `refresh` of a large view fetches only what has changed."""

    # Reading and writing

    @with_store
    async def test_a_new_store_is_empty(self, store: MetaStore) -> None:
        assert await store.read(["a"], ["", "b"]) == View(0, {})

    @with_store
    async def test_what_was_committed_is_there(self, store: MetaStore) -> None:
        stamp = await store.commit(puts={"q/a": b"\x00\xff", "q/b": b"", "r": b"3"})
        expected = {"q/a": Entry(b"\x00\xff", stamp), "q/b": Entry(b"", stamp)}
        assert await store.read(prefixes=["q/"]) == View(stamp, expected)
        assert await store.read(["q/b", "none"]) == View(stamp, {"q/b": expected["q/b"]})
        assert (await store.read(["r"], ["q/", "r"])).entries == expected | {"r": Entry(b"3", stamp)}

    @with_store
    async def test_replacing_and_deleting(self, store: MetaStore) -> None:
        first = await store.commit(puts={"a": b"1", "b": b"1", "c": b"1"})
        second = await store.commit(puts={"a": b"2"}, deletes=["b", "never"])
        assert second > first
        assert await store.read(prefixes=[""]) == View(second, {"a": Entry(b"2", second), "c": Entry(b"1", first)})
        third = await store.commit(puts={"b": b"3"})
        assert (await store.read(["b"])).entries == {"b": Entry(b"3", third)}

    @with_store
    async def test_a_view_is_not_touched_by_what_comes_after(self, store: MetaStore) -> None:
        stamp = await store.commit(puts={"a": b"1"})
        view = await store.read(prefixes=[""])
        await store.commit(puts={"a": b"2", "b": b"2"})
        assert view == View(stamp, {"a": Entry(b"1", stamp)})

    @with_store
    async def test_every_commit_raises_the_stamp(self, store: MetaStore) -> None:
        stamps = [
            await store.commit(puts={"a": b"1"}),
            await store.commit(puts={"a": b"1"}),
            await store.commit(deletes=["a"]),
            await store.commit(deletes=["a"]),
            await store.commit(),
        ]
        assert stamps == sorted(set(stamps))
        assert (await store.read()).stamp == stamps[-1]

    @driven
    async def test_two_openings_share_the_data(self, open_store: OpenStore[MetaStore]) -> None:
        async with Opened(open_store) as one, Opened(open_store) as two:
            first = await one.commit(puts={"a": b"1"})
            assert await two.read(["a"]) == View(first, {"a": Entry(b"1", first)})
            second = await two.commit(checks={"a": first}, puts={"a": b"2"})
            assert second > first
            with pytest.raises(ConflictError):
                await one.commit(checks={"a": first}, puts={"a": b"3"})
            assert (await one.read(["a"])).entries == {"a": Entry(b"2", second)}

    # Refreshing

    @with_store
    async def test_a_refreshed_view_is_what_a_read_returns(self, store: MetaStore) -> None:
        """Three readers of different ages, at prefixes that overlap, while keys come, change and go."""
        random = Random(7)
        ages, prefixes = (1, 3, 17), ("q/", "q/a", "q")
        views = {(age, prefix): NOTHING for age in ages for prefix in prefixes}
        keys = ["q", "q/", *(f"q/{first}{last}" for first in "ab" for last in "123"), "q0", "r"]
        # Large, so that reading all of them again does not pay.
        await store.commit(puts={f"q/{number}": bytes(5_000) for number in range(4)})
        for step in range(60):
            some = random.sample(keys, 3)
            await store.commit(puts={some[0]: b"%d" % step, some[1]: b""}, deletes=some[2:])
            for age, prefix in views:
                if step % age == 0:
                    view = views[age, prefix] = await store.refresh(views[age, prefix], prefix)
                    assert view == await store.read(prefixes=[prefix])

    @with_store
    async def test_a_refresh_fetches_only_what_has_changed(self, store: MetaStore) -> None:
        if not self.fetches_changes:
            pytest.skip("this store reads everything again")
        await store.commit(puts={f"q/{number}": bytes(5_000) for number in range(8)})
        view = await store.refresh(NOTHING, "q/")
        assert await store.refresh(view, "q/") == view
        stamp = await store.commit(puts={"q/1": b"new", "q/9": b"9", "r": b""}, deletes=["q/2"])
        after = await store.refresh(view, "q/")
        assert after.stamp == stamp
        assert after.entries.keys() - view.entries.keys() == {"q/9"}
        assert view.entries.keys() - after.entries.keys() == {"q/2"}
        same = {key for key in after.entries if after.entries[key] is view.entries.get(key)}
        assert same == {f"q/{number}" for number in (0, 3, 4, 5, 6, 7)}
        assert len(view.entries) == 8, "the earlier view is as it was"

    @with_store
    async def test_a_key_deleted_and_put_again_between_two_looks_is_there(self, store: MetaStore) -> None:
        await store.commit(puts={"q/a": bytes(20_000), "q/b": b"1"})
        view = await store.refresh(NOTHING, "q/")
        await store.commit(deletes=["q/b"])
        stamp = await store.commit(puts={"q/b": b"1"})
        assert (await store.refresh(view, "q/")).entries["q/b"] == Entry(b"1", stamp)
        await store.commit(puts={"q/c": b"1"})
        await store.commit(deletes=["q/c", "never"])
        assert (await store.refresh(view, "q/")).entries.keys() == {"q/a", "q/b"}

    @with_store
    async def test_a_view_of_before_the_store_was_set_back_is_read_anew(self, store: MetaStore) -> None:
        await store.commit(puts={"q/a": bytes(20_000)})
        now = await store.read(prefixes=["q/"])
        ahead = View(now.stamp + 1_000, {"q/a": Entry(bytes(20_000), 1), "q/b": Entry(b"", now.stamp + 1_000)})
        assert await store.refresh(ahead, "q/") == now

    # Checks

    @with_store
    async def test_a_check_that_fails_writes_nothing(self, store: MetaStore) -> None:
        first = await store.commit(puts={"a": b"1", "b": b"1"})
        second = await store.commit(puts={"a": b"2"})
        before = await store.read(prefixes=[""])
        for wrong in ({"a": first}, {"a": None}, {"none": first}, {"a": second + 1}, {"b": first, "a": first}):
            with pytest.raises(ConflictError):
                await store.commit(checks=wrong, puts={"c": b"3"}, deletes=["b"])
        assert await store.read(prefixes=[""]) == before
        assert await store.commit(checks={"a": second, "b": first, "none": None}, puts={"c": b"3"}) > second

    @with_store
    async def test_a_deleted_key_is_absent(self, store: MetaStore) -> None:
        first = await store.commit(puts={"a": b"1"})
        second = await store.commit(deletes=["a"])
        for wrong in (first, second):
            with pytest.raises(ConflictError):
                await store.commit(checks={"a": wrong}, puts={"a": b"2"})
        third = await store.commit(checks={"a": None}, puts={"a": b"2"})
        with pytest.raises(ConflictError):
            await store.commit(checks={"a": None}, puts={"a": b"3"})
        assert (await store.read(["a"])).entries == {"a": Entry(b"2", third)}

    @pytest.mark.parametrize("prefix", PREFIXES, ids=ascii)
    @with_store
    async def test_unchanged_notices_what_is_under_the_prefix_and_nothing_else(self, store: MetaStore, prefix: str) -> None:
        inside = [prefix, prefix + "a", prefix + "\U0010ffff", prefix + "%"]
        outside = [
            key
            for key in ("A", "a", "ac", "b", "é" + "x", "d", "f", "\ue000", "\U0010fffe", "~", "q", "q0", "p/")
            if not key.startswith(prefix)
        ]
        start = await store.commit(puts=dict.fromkeys([*inside, *outside], b"0"))
        assert set((await store.read(prefixes=[prefix])).entries) == set(inside)
        now = await store.commit(puts=dict.fromkeys(outside[::2], b"1"), deletes=outside[1::2])
        last = await store.commit(unchanged={prefix: start})
        for number, key in enumerate(inside):
            changed = await store.commit(puts={} if number % 2 else {key: b"1"}, deletes=[key] if number % 2 else [])
            for since in (start, now, last):
                with pytest.raises(ConflictError):
                    await store.commit(unchanged={prefix: since}, puts={"x": b"x"})
            last = changed
        assert "x" not in (await store.read(["x"])).entries
        await store.commit(unchanged={prefix: last}, puts={"x": b"x"})

    @with_store
    async def test_unchanged_notices_an_insert_an_update_and_a_delete(self, store: MetaStore) -> None:
        await store.commit(puts={"q/a": b"1"})
        for puts, deletes in (({"q/b": b"1"}, []), ({"q/a": b"2"}, []), ({}, ["q/b"])):
            view = await store.read(prefixes=["q/"])
            await store.commit(unchanged={"q/": view.stamp}, puts={"r": b""})
            await store.commit(puts=puts, deletes=deletes)
            with pytest.raises(ConflictError):
                await store.commit(unchanged={"q/": view.stamp}, puts={"r": b"x"})
        assert (await store.read(["r"])).entries["r"].value == b""

    @with_store
    async def test_a_key_put_and_deleted_in_between_has_changed(self, store: MetaStore) -> None:
        stamp = await store.commit()
        await store.commit(puts={"q/a": b"1"})
        await store.commit(deletes=["q/a"])
        with pytest.raises(ConflictError):
            await store.commit(unchanged={"q/": stamp})

    @with_store
    async def test_only_one_of_many_takes_a_key(self, store: MetaStore) -> None:
        async def take(number: int) -> bool:
            try:
                await store.commit(checks={"owner": None}, puts={"owner": b"%d" % number})
            except ConflictError:
                return False
            return True

        taken = await asyncio.gather(*(take(number) for number in range(16)))
        assert taken.count(True) == 1
        assert (await store.read(["owner"])).entries["owner"].value == b"%d" % taken.index(True)

    # Limits

    @with_store
    async def test_the_number_of_keys_is_limited(self, store: MetaStore) -> None:
        keys = [f"k{number:04}" for number in range(MAX_COMMIT_KEYS + 1)]
        with pytest.raises(ValueError, match=str(MAX_COMMIT_KEYS)):
            await store.commit(puts=dict.fromkeys(keys, b""))
        with pytest.raises(ValueError, match=str(MAX_COMMIT_KEYS)):
            await store.commit(puts={keys[0]: b""}, deletes=keys[1:])
        assert await store.read(prefixes=[""]) == View(0, {})
        await store.commit(puts=dict.fromkeys(keys[1:], b""))
        assert len((await store.read(prefixes=["k"])).entries) == MAX_COMMIT_KEYS

    @with_store
    async def test_the_number_of_bytes_is_limited(self, store: MetaStore) -> None:
        with pytest.raises(ValueError, match=str(MAX_COMMIT_BYTES)):
            await store.commit(puts={"é": bytes(MAX_COMMIT_BYTES - 1)})
        assert await store.read(prefixes=[""]) == View(0, {})
        await store.commit(puts={"é": bytes(MAX_COMMIT_BYTES - 2)})
        assert len((await store.read(["é"])).entries["é"].value) == MAX_COMMIT_BYTES - 2

    # Stamps and watching

    @with_store
    async def test_stamps_become_visible_in_commit_order(self, store: MetaStore) -> None:
        stamps: set[Stamp] = set()
        views: list[View] = []

        async def write(writer: int) -> None:
            for number in range(25):
                stamps.add(await store.commit(puts={f"w/{writer}/{number}": b""}))

        async def look() -> None:
            while not views or len(views[-1].entries) < 200:
                views.append(await store.read(prefixes=["w/"]))
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(look())
            for writer in range(8):
                group.create_task(write(writer))
        assert len(stamps) == 200
        check_visible_in_order(views, stamps)

    @with_store
    async def test_a_watch_wakes_for_every_kind_of_change(self, store: MetaStore) -> None:
        await store.read()
        watching = store.watch("q/")
        for puts, deletes in (({"q/a": b"1"}, []), ({"q/a": b"2"}, []), ({}, ["q/a"])):
            stamp = await store.commit(puts=puts, deletes=deletes)
            assert await next_hint(watching, stamp) >= stamp

    @with_store
    async def test_a_watch_wakes_one_who_waits(self, store: MetaStore) -> None:
        watching = store.watch("q/")
        stamp = await store.commit(puts={"q/a": b"0"})
        await next_hint(watching, stamp)
        for number in range(50):
            waiting = asyncio.create_task(next_hint(watching, stamp + 1))
            # With each number of steps into the wait, to hit a change that falls between look and wait.
            for _ in range(number % 8):
                await asyncio.sleep(0)
            stamp = await store.commit(puts={"q/a": b"%d" % number})
            assert await waiting >= stamp

    @driven
    async def test_a_watch_sees_what_another_opening_commits(self, open_store: OpenStore[MetaStore]) -> None:
        async with Opened(open_store) as one, Opened(open_store) as two:
            watching = one.watch("q/")
            stamp = 0
            for number in range(3):
                waiting = asyncio.create_task(next_hint(watching, stamp + 1))
                stamp = await two.commit(puts={"q/a": b"%d" % number})
                assert await waiting >= stamp
