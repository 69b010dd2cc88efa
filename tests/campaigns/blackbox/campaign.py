"""A campaign on one target: rounds of load and faults, each of which ends with empty queues and is judged then."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.campaigns.blackbox import checkers
from tests.campaigns.blackbox.checkers import Anomaly
from tests.campaigns.blackbox.nemeses import Bag, Nemesis
from tests.campaigns.blackbox.operation_log import Fault, Operation, Round, RoundLog
from tests.campaigns.blackbox.targets import Target
from tests.campaigns.blackbox.waits import Waits
from tests.campaigns.blackbox.workloads import TICKS, Goal, Setup, drain, load, schedule_names

GAP = (1.0, 3.5)
"""Seconds, from and to, between two faults."""
END_WITHIN = 60.0
"""Seconds after the last fault within which each client must have ended what it was at."""


class Judged(NamedTuple):
    """A round and what is wrong with it."""

    number: int
    round: Round
    anomalies: list[Anomaly]
    history: Path
    seconds: float
    """From the beginning of the campaign until this round was judged."""


class Plan(NamedTuple):
    """How long there are rounds, and how long there is load in each, in seconds; and the seed of all choices."""

    length: float
    round: float
    seed: int


async def rounds(target: Target, kinds: Sequence[Nemesis], folder: Path, plan: Plan) -> AsyncIterator[Judged]:
    """One round after the other, until the time is up. Their histories are in that folder."""
    chance = random.Random(plan.seed)
    bag = Bag(kinds, chance)
    began = time.monotonic()
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False) as http:
        setup = Setup(http, target.members)
        await setup.create()
        for number in itertools.count(1):
            log = RoundLog(folder / f"round-{number:03}.jsonl")
            goal = Goal(http, target.members, log, number, plan.seed)
            await _Play(target, setup, goal, bag, chance, plan.round).round()
            history = log.close()
            yield Judged(number, log.round, checkers.check(log.round), history, time.monotonic() - began)
            is_down = not all(member.is_there for member in target.members)
            if is_down or time.monotonic() - began > plan.length - plan.round / 2:
                return


class _Play:
    """One round."""

    def __init__(self, target: Target, setup: Setup, goal: Goal, bag: Bag, chance: random.Random, length: float) -> None:
        self._target = target
        self._setup = setup
        self._goal = goal
        self._bag = bag
        self._chance = chance
        self._length = length

    async def round(self) -> None:
        log = self._goal.log
        round = log.round
        round.began = time.time()
        for name in schedule_names():
            log.operation(Operation("operator", "schedule", TICKS, round.began, round.began, "done", {"schedule": name}))
        tracebacks = [each.tracebacks() for each in self._target.members]
        crew = load(self._goal)
        waits = Waits(self._target.processes, log.wait)
        watching = asyncio.create_task(waits.watch())
        try:
            round.before = await self._setup.counters()
            crew.start()
            await self._strike()
            await crew.stop(END_WITHIN)
            round.is_drained, round.after = await drain(self._goal, self._setup, waits)
        except AssertionError as error:
            # A member that does not start again, or a call of the operator that is not answered.
            round.observed.append(str(error))
        finally:
            # Also when the campaign is stopped.
            await crew.stop(0.0)
            watching.cancel()
        for member, before in zip(self._target.members, tracebacks, strict=True):
            if member.tracebacks() > before:
                round.observed.append(f"the log of {member.name} has a traceback")
        round.ended = time.time()

    async def _strike(self) -> None:
        """One fault after the other."""
        until = time.monotonic() + self._length
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self._chance.uniform(*GAP)))
            if time.monotonic() < until and (nemesis := self._bag.take()):
                await self._strike_once(nemesis)

    async def _strike_once(self, nemesis: Nemesis) -> None:
        began = time.time()
        strike = await asyncio.to_thread(nemesis.strike, self._chance)
        try:
            await asyncio.sleep(self._chance.uniform(*nemesis.lasts))
        finally:
            # Also when the campaign is stopped: a process that stands still cannot be ended in good order.
            await asyncio.to_thread(strike.mend)
        self._goal.log.fault(Fault(nemesis.kind, strike.at, began, time.time(), nemesis.hangs))
