"""Conformance suite of PositionStore."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from random import Random

import pytest

from sluiceway.adapters import system
from sluiceway.ports.position_store import FencedError, Opening, PositionRecord, PositionStore
from sluiceway.testing.drive import driven

OpenPositions = Callable[[], AbstractAsyncContextManager[PositionStore]]
"""Opens the test's position store for the duration of a block, over its own connection; each call opens another on the same data."""

NOTHING = PositionRecord()
FULL = PositionRecord(position="16/B374D848", plan="16/B374D900", batch=7, at=1_790_000_000_123, behind=0, records=70_001)

ODD_TOKENS = [
    "",
    " ",
    "/",
    "a/b/../c",
    "a",
    "A",
    "a/",
    "ä€𝄞",
    "a\u0301",
    "á",
    "%",
    "%41",
    "_",
    "\\",
    "'; DROP TABLE position; --",
    '"',
    "line\nbreak",
    "\x00",
    "\x7f",
    "shardId-000000000000",
    "x" * 1_000,
    "x" * 999 + "y",
    "y" + "x" * 999,
    "€" * 333,
    "%" * 1_000,
]


def at(position: int, plan: int | None = None) -> PositionRecord:
    return PositionRecord(position=f"{position:04}", plan=None if plan is None else f"{plan:04}", batch=position)


class PositionStoreSuite:
    """Conformance suite. Its fixture `open_positions` returns a function without arguments: an async context manager of a store."""

    # Keeping

    @driven
    async def test_nothing_is_kept_of_what_was_never_opened(self, open_positions: OpenPositions) -> None:
        async with open_positions() as store:
            assert await store.read() == {}
            opening, kept = await store.open("p", 3)
            assert kept == NOTHING
            assert (opening.token, opening.grant) == ("p", 3)

    @driven
    async def test_what_was_committed_is_what_the_next_opening_finds(self, open_positions: OpenPositions) -> None:
        async with open_positions() as store, open_positions() as other:
            opening, _ = await store.open("p", 3)
            for kept in (at(1), FULL, NOTHING, at(2, 3), FULL):
                await store.commit(opening, kept)
                assert (await other.read())["p"].kept == kept
            assert (await other.open("p", 9))[1] == FULL
            assert (await store.open("p", 10))[1] == FULL
        async with open_positions() as store:
            assert (await store.read())["p"].kept == FULL
            assert (await store.open("p", 10))[1] == FULL

    @driven
    async def test_partitions_have_nothing_to_do_with_each_other(self, open_positions: OpenPositions) -> None:
        async with open_positions() as store, open_positions() as other:
            openings = {token: (await store.open(token, 5))[0] for token in ODD_TOKENS}
            for number, token in enumerate(ODD_TOKENS):
                await store.commit(openings[token], at(number))
            assert {token: stored.kept for token, stored in (await other.read()).items()} == {
                token: at(number) for number, token in enumerate(ODD_TOKENS)
            }
            for number, token in enumerate(ODD_TOKENS):
                assert (await other.open(token, 6))[1] == at(number)
                with pytest.raises(FencedError) as caught:
                    await store.commit(openings[token], at(number + 1))
                assert (caught.value.token, caught.value.grant) == (token, 6)

    @driven
    async def test_who_looks_sees_the_grant_and_when_it_was_written(self, open_positions: OpenPositions) -> None:
        async with open_positions() as store:
            before = system.now()
            opening, _ = await store.open("p", 3)
            await store.commit(opening, at(1))
            stored = (await store.read())["p"]
            assert (stored.grant, stored.kept) == (3, at(1))
            assert before <= stored.written_at <= system.now()
            await store.open("p", 8)
            stored = (await store.read())["p"]
            assert (stored.grant, stored.kept) == (8, at(1))

    # The fence

    @driven
    async def test_a_lower_grant_is_refused_and_changes_nothing(self, open_positions: OpenPositions) -> None:
        async with open_positions() as store, open_positions() as other:
            opening, _ = await store.open("p", 5)
            await store.commit(opening, at(1))
            for grant in (4, 0):
                with pytest.raises(FencedError) as caught:
                    await other.open("p", grant)
                assert caught.value.grant == 5
            await store.commit(opening, at(2))
            assert (await other.open("p", 6))[1] == at(2)

    @driven
    async def test_what_was_opened_later_under_a_higher_grant_ends_it(self, open_positions: OpenPositions) -> None:
        async with open_positions() as store, open_positions() as other:
            opening, _ = await store.open("p", 5)
            await store.commit(opening, at(1))
            later, kept = await other.open("p", 6)
            assert kept == at(1)
            for _ in range(2):
                with pytest.raises(FencedError) as caught:
                    await store.commit(opening, at(2))
                assert caught.value.grant == 6
            assert (await store.read())["p"].kept == at(1)
            await other.commit(later, at(3))
            with pytest.raises(FencedError):
                await store.commit(opening, at(2))
            assert (await store.read())["p"].kept == at(3)

    @pytest.mark.parametrize("same", [True, False])
    @driven
    async def test_a_later_opening_of_the_same_grant_ends_it_too(self, open_positions: OpenPositions, *, same: bool) -> None:
        async with open_positions() as store, open_positions() as another:
            other = store if same else another
            first, _ = await store.open("p", 5)
            await store.commit(first, at(1))
            second, kept = await other.open("p", 5)
            assert kept == at(1)
            assert second != first
            assert second.number > first.number
            with pytest.raises(FencedError) as caught:
                await store.commit(first, at(9))
            assert caught.value.grant == 5
            await other.commit(second, at(2))
            with pytest.raises(FencedError):
                await store.commit(first, at(9))
            assert (await store.read())["p"].kept == at(2)

    @driven
    async def test_an_opening_that_never_was_is_refused(self, open_positions: OpenPositions) -> None:
        async with open_positions() as store:
            opening, _ = await store.open("p", 5)
            for wrong in (opening._replace(number=opening.number + 1), opening._replace(grant=4), Opening("q", 5, opening.number)):
                with pytest.raises(FencedError):
                    await store.commit(wrong, at(9))
            await store.commit(opening, at(1))
            assert {token: stored.kept for token, stored in (await store.read()).items()} == {"p": at(1)}

    @driven
    async def test_of_many_who_open_at_once_one_can_commit(self, open_positions: OpenPositions) -> None:
        async with open_positions() as store, open_positions() as other:
            grants = [7, 3, 7, 5, 7, 6, 7]
            opened = await asyncio.gather(
                *((store, other)[number % 2].open("p", grant) for number, grant in enumerate(grants)), return_exceptions=True
            )
            openings = [each[0] for each in opened if not isinstance(each, BaseException)]
            assert all(isinstance(each, FencedError) for each in opened if isinstance(each, BaseException))
            assert len({opening.number for opening in openings}) == len(openings)
            assert sum(opening.grant == 7 for opening in openings) == 4
            answers = await asyncio.gather(
                *((store, other)[number % 2].commit(opening, at(number)) for number, opening in enumerate(openings)),
                return_exceptions=True,
            )
            assert [type(answer) for answer in answers if answer is not None] == [FencedError] * (len(openings) - 1)
            last = answers.index(None)
            assert openings[last] == max(openings, key=lambda opening: opening.number)
            assert (await store.read())["p"].kept == at(last)

    @driven
    async def test_positions_never_go_back_whoever_opens_meanwhile(self, open_positions: OpenPositions) -> None:
        """Each continues from the position its opening found, as readers do, and advances until it is refused."""
        async with open_positions() as one, open_positions() as two, open_positions() as three:
            random = Random(8)
            grants, positions = [1], [0]

            async def live(store: PositionStore) -> None:
                for _ in range(8):
                    try:
                        opening, kept = await store.open("p", max(1, max(grants) + random.randrange(-1, 2)))
                        grants.append(opening.grant)
                        position = int(kept.position or 0)
                        for _ in range(random.randrange(6)):
                            position += 1
                            await store.commit(opening, at(position))
                            positions.append(position)
                    except FencedError:
                        continue

            await asyncio.gather(*(live(store) for store in (one, two, three)))
            # Each position was committed once: no two owners committed from the same place.
            assert len(positions) == len(set(positions)) > 1
            assert (await one.read())["p"].kept == at(max(positions))

    # Forgetting

    @driven
    async def test_what_is_forgotten_is_gone_with_its_fence(self, open_positions: OpenPositions) -> None:
        async with open_positions() as store, open_positions() as other:
            openings = {}
            for token in ("p", "q", "r"):
                openings[token], _ = await store.open(token, 5)
                await store.commit(openings[token], at(1))
            await other.forget(["p", "q", "never"])
            await other.forget([])
            assert (await store.read()).keys() == {"r"}
            for token in ("p", "q"):
                with pytest.raises(FencedError):
                    await store.commit(openings[token], at(2))
            assert (await store.read()).keys() == {"r"}
            opening, kept = await other.open("p", 1)
            assert kept == NOTHING
            with pytest.raises(FencedError):
                await store.commit(openings["p"], at(2))
            await other.commit(opening, at(1))
            await store.commit(openings["r"], at(2))

    @driven
    async def test_more_are_forgotten_than_a_commit_of_a_meta_store_holds(self, open_positions: OpenPositions) -> None:
        async with open_positions() as store:
            tokens = [f"shardId-{number:012}" for number in range(1_050)]
            there = tokens[::70]
            await asyncio.gather(*(store.open(token, 1) for token in there))
            assert (await store.read()).keys() == set(there)
            await store.forget(tokens[:1_040])
            assert (await store.read()).keys() == {there[-1]} - set(tokens[:1_040])
            await store.open(tokens[1_041], 1)
            await store.forget(tokens)
            assert await store.read() == {}
