"""Nemeses: each does one kind of harm to a target, and undoes it. They know of processes, files, lines and the C library."""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.campaigns.blackbox import faulty_system
from tests.campaigns.blackbox.faulty_system import Mischief
from tests.campaigns.blackbox.surgeries import Releases, Surgeon
from tests.campaigns.blackbox.targets import Target
from tests.campaigns.kit.lines import Line

CLOCK_JUMP = 3_600
SLOW_LINE = 0.15
"""Seconds."""
SLOW_BUCKET = "300/1000"
"""Median and p99 of its answers, in milliseconds."""


class Strike(NamedTuple):
    """Harm that is done. `mend` undoes it, and returns when it is undone."""

    at: str
    mend: Callable[[], None]


class Nemesis(NamedTuple):
    kind: str
    strike: Callable[[random.Random], Strike]
    lasts: tuple[float, float] = (1.0, 4.0)
    """Seconds, from and to, between the strike and its mending."""
    hangs: bool = False
    """Whether calls may get no answer meanwhile."""


def nemeses(target: Target) -> list[Nemesis]:
    """All that can be done to that target on this machine."""
    found = [
        Nemesis("kill", lambda chance: _kill(target, chance), (0.3, 2.0)),
        Nemesis("freeze", lambda chance: _freeze(target, chance), (2.0, 8.0), hangs=True),
    ]
    if not target.workers:
        found.append(Nemesis("kill at start", lambda chance: _kill_at_start(target, chance), (0.1, 1.2)))
        found.append(Nemesis("restart", lambda chance: _restart(target, chance), (0.0, 0.5)))
    for link in target.members[0].links._fields:
        if getattr(target.members[0].links, link) is not None:
            found += [_cut(target, link, how, do, hangs=hangs) for how, (do, hangs) in _CUTS.items()]
    if target.postgres is not None:
        found.append(Nemesis("PostgreSQL killed", lambda _: _postgres_killed(target)))
        found.append(Nemesis("PostgreSQL frozen", lambda _: _postgres_frozen(target), (2.0, 6.0), hangs=True))
    if target.bucket:
        found.append(Nemesis("bucket slow", lambda _: _bucket_slow(target), (3.0, 6.0), hangs=True))
    found.append(_upgrade(target))
    if target.storage == "sqlite":
        surgeon = Surgeon(target.members[0])
        operations = {"bit flip": surgeon.flip_a_bit, "lost partitions": surgeon.lose_partitions, "older partitions": surgeon.attach_older}
        found += [_surgery(target, kind, operate) for kind, operate in operations.items()]
    if target.members[0].system is not None:
        disks = {"disk full": faulty_system.FULL, "disk read-only": faulty_system.READ_ONLY, "disk broken": faulty_system.BROKEN}
        disks |= {"syncs fail": faulty_system.UNSYNCED, "disk slow": faulty_system.SLOW}
        found += [_mischief(target, kind, mischief) for kind, mischief in disks.items() if target.storage.endswith("sqlite")]
        found += [_mischief(target, f"clock {way}", Mischief(clock=clock)) for way, clock in (("ahead", CLOCK_JUMP), ("back", -CLOCK_JUMP))]
    return found


# ---- processes ----------------------------------------------------------------------------------------------------------


def _kill(target: Target, chance: random.Random) -> Strike:
    victim = target.victim(chance)
    victim.kill()
    return Strike(victim.name, victim.revive)


def _kill_at_start(target: Target, chance: random.Random) -> Strike:
    """Kill it, and once more while it starts."""
    member = chance.choice(target.members)
    member.kill()
    member.launch()

    def mend() -> None:
        member.kill()
        member.revive()

    return Strike(member.name, mend)


def _restart(target: Target, chance: random.Random) -> Strike:
    """Stop it in good order."""
    member = chance.choice(target.members)
    code = member.stop()
    assert code == 0, f"{member.name} was stopped, and ended with {code}:\n{member.tail()}"
    return Strike(member.name, member.revive)


def _upgrade(target: Target) -> Nemesis:
    releases = Releases(target)

    def strike(_: random.Random) -> Strike:
        releases.change()
        return Strike("", lambda: None)

    return Nemesis("other release", strike, (0.0, 0.5))


def _surgery(target: Target, kind: str, operate: Callable[[random.Random], None]) -> Nemesis:
    """The server is down meanwhile."""
    member = target.members[0]

    def strike(chance: random.Random) -> Strike:
        operate(chance)
        return Strike(member.name, member.revive)

    return Nemesis(kind, strike, (0.0, 0.3))


def _freeze(target: Target, chance: random.Random) -> Strike:
    victim = target.victim(chance)
    victim.freeze()
    return Strike(victim.name, victim.thaw)


# ---- connections --------------------------------------------------------------------------------------------------------

_CUTS: dict[str, tuple[Callable[[Line], None], bool]] = {
    "reset": (lambda line: line.cut(), False),
    "silent": (lambda line: line.silence("up", "down"), True),
    "one way unheard": (lambda line: line.silence("up"), True),
    "one way unanswered": (lambda line: line.silence("down"), True),
    "slow": (lambda line: line.delay(SLOW_LINE), True),
}


def _cut(target: Target, link: str, how: str, do: Callable[[Line], None], *, hangs: bool) -> Nemesis:
    """On the line of one member to its clients, its meta store, its storage, or from its peers."""

    def strike(chance: random.Random) -> Strike:
        member = chance.choice(target.members)
        line: Line = getattr(member.links, link)
        do(line)
        return Strike(member.name, line.mend)

    return Nemesis(f"{link} {how}", strike, (1.0, 6.0), hangs=hangs)


# ---- what the servers stand on ------------------------------------------------------------------------------------------


def _postgres_killed(target: Target) -> Strike:
    assert target.postgres is not None
    target.postgres.kill()
    return Strike("postgresql", _then_ready(target, target.postgres.start))


def _postgres_frozen(target: Target) -> Strike:
    assert target.postgres is not None
    target.postgres.pause()
    return Strike("postgresql", _then_ready(target, target.postgres.resume))


def _bucket_slow(target: Target) -> Strike:
    _latency(target, SLOW_BUCKET)
    return Strike("bucket", lambda: _latency(target, "0/0"))


def _latency(target: Target, figures: str) -> None:
    with urllib.request.urlopen(f"{target.bucket}/-/latency/{figures}", timeout=60) as answer:
        answer.read()


def _mischief(target: Target, kind: str, mischief: Mischief) -> Nemesis:
    def strike(chance: random.Random) -> Strike:
        member = chance.choice(target.members)
        system = member.system
        assert system is not None
        system.befall(mischief)

        def mend() -> None:
            struck = system.end()
            # The load never rests for so long: without one, the library was not in the way.
            assert struck or mischief.clock, f"{kind}: not one write of {member.name} was struck"

        return Strike(member.name, _then_ready(target, mend))

    return Nemesis(kind, strike, (1.0, 5.0), hangs=bool(mischief.delay))


def _then_ready(target: Target, mend: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        mend()
        target.await_ready()

    return both


class Bag:
    """Deals nemeses so that each comes once before any comes again."""

    def __init__(self, kinds: Sequence[Nemesis], chance: random.Random) -> None:
        self._kinds = kinds
        self._chance = chance
        self._left: list[Nemesis] = []

    def take(self) -> Nemesis | None:
        """None: there are none."""
        if not self._left:
            self._left = self._chance.sample(self._kinds, len(self._kinds))
        return self._left.pop() if self._left else None
