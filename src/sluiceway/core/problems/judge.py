"""The judge: samples and the time in, problems out. It remembers what was wrong, so that a problem neither flaps nor loses
its beginning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sluiceway.contract.problem_answers import Kind
from sluiceway.core.problems import thresholds as t
from sluiceway.core.problems.findings import Finding, seconds
from sluiceway.core.problems.observations import BackendSample, InstanceSample, QueueFacts, QueueSample
from sluiceway.core.problems.queue_rules import find
from sluiceway.core.problems.window import Window
from sluiceway.kernel.clock import Millis
from sluiceway.model.problems import Problem, ranked


@dataclass(slots=True)
class _Open:
    """A problem that lasts: its last finding, its beginning, and when it was last seen."""

    finding: Finding
    since: Millis
    seen_at: Millis


_Name = tuple[str, str]
"""A problem, by kind and subject."""


class _Register:
    """The open problems of one queue, or of the instance."""

    def __init__(self) -> None:
        self._open: dict[_Name, _Open] = {}

    def is_open(self, kind: str) -> bool:
        return any(name == kind for name, _ in self._open)

    def take(self, findings: Iterable[Finding], now: Millis) -> None:
        """Open what is found, and close what was not found for CLEARS_AFTER."""
        for finding in findings:
            name = (finding.kind, finding.subject)
            known = self._open.get(name)
            since = finding.since if finding.since is not None else now
            self._open[name] = _Open(finding, since if known is None else min(since, known.since), now)
        self._open = {name: each for name, each in self._open.items() if now - each.seen_at < t.CLEARS_AFTER}

    def __bool__(self) -> bool:
        return bool(self._open)

    def close(self, kind: Kind) -> None:
        """Close at once what is known to be over."""
        self._open = {name: each for name, each in self._open.items() if name[0] != kind}

    def __iter__(self) -> Iterator[_Open]:
        return iter(self._open.values())


@dataclass(slots=True)
class _Queue:
    facts: QueueFacts
    window: Window = field(default_factory=Window)
    problems: _Register = field(default_factory=_Register)


class Judge:
    """What is wrong with one instance and its shares of the queues. Feed it every INTERVAL; samples may come late."""

    def __init__(self, instance: str = "") -> None:
        self.instance = instance
        """Name of the instance; empty: a server that is alone."""
        self._queues: dict[str, _Queue] = {}
        self._own = _Register()
        self._looked = False
        """Whether the queues of the first look are known."""
        self._since: dict[str, Millis] = {}
        """Since when something has been so in every sample, by name."""

    # ---- feeding ----------------------------------------------------------------------------------------------

    def see_queue(self, incarnation: str, facts: QueueFacts, sample: QueueSample) -> None:
        """Judge a queue by one more sample."""
        queue = self._queues.get(incarnation)
        if queue is None:
            queue = self._queues[incarnation] = _Queue(facts)
            if self._looked:
                # The share began after the last look, and its counts with zero.
                queue.window.add(QueueSample(sample.at - t.INTERVAL))
            paused = dict.fromkeys(facts.paused, min(facts.updated_at, sample.at))
        else:
            paused = {verb: queue.window.paused_since.get(verb, sample.at) for verb in facts.paused}
        queue.facts = facts
        queue.window.paused_since = paused
        queue.window.add(sample)
        if not facts.paused:
            queue.problems.close("queue_paused")
        if queue.window.is_idle and not queue.problems:
            return
        queue.problems.take(list(find(facts, queue.window, queue.problems.is_open)), sample.at)

    def keep(self, incarnations: Iterable[str]) -> None:
        """Forget the queues that are deleted, or have no partition here any more: all but these."""
        there = {*incarnations}
        self._queues = {incarnation: queue for incarnation, queue in self._queues.items() if incarnation in there}

    def see_instance(self, sample: InstanceSample) -> None:
        """Judge the instance by one more sample; it ends a look at all queues."""
        self._looked = True
        self._own.take(list(self._of_instance(sample)), sample.at)

    def _of_instance(self, sample: InstanceSample) -> Iterator[Finding]:
        for backend in sample.backends:
            if (found := self._of_backend(backend, sample.at)) is not None:
                yield found
        for name, share in sample.throttled.items():
            if (found := self._of_bucket(name, share, sample.at)) is not None:
                yield found
        for disk, why in sample.disks.items():
            yield Finding(
                "disk_full",
                "critical",
                f"the disk of {disk} is full: produces are refused",
                why,
                "sluiceway doctor",
                "/ui/map",
                subject=disk,
            )
        for name in sample.silent:
            yield Finding(
                "instance_silent",
                "critical",
                f"instance {name} sends no heartbeats; the other instances take over its partitions",
                "it has stopped, hangs, or cannot reach the meta store",
                "sluiceway instance list",
                "/ui/instances",
                subject=name,
            )
        idle_since = self._lasts("idle", bool(sample.idle), sample.at)
        if idle_since is not None and sample.at - idle_since >= t.UNSERVED_AFTER:
            message = "this instance serves no partitions of its own"
            yield Finding(
                "instance_idle", "critical", message, sample.idle, "sluiceway instance list", "/ui/instances", subject=self.instance
            )
        if sample.clock:
            fix = "sluiceway doctor"
            yield Finding("clock_wrong", "critical", "the server's clock is wrong", sample.clock, fix, "/ui/instances", subject="clock")
        if (found := self._of_upgrade(sample)) is not None:
            yield found

    def _of_backend(self, backend: BackendSample, now: Millis) -> Finding | None:
        if backend.problem is not None:
            message = f"backend {backend.name} does not serve its partitions"
            return Finding("backend_down", "critical", message, backend.problem, "sluiceway backend list", "/ui/map", subject=backend.name)
        since = self._lasts(f"slow {backend.name}", backend.slowest >= t.SLOW_COMMIT, now)
        if since is None:
            return None
        stuck = backend.slowest >= t.STUCK_COMMIT
        if not stuck and now - since < t.STARTS_AFTER:
            return None
        took = seconds(backend.slowest) if backend.slowest >= 10_000 else f"{backend.slowest:,} ms"
        return Finding(
            "backend_slow",
            "critical" if stuck else "warning",
            f"a commit to backend {backend.name} takes {took}" + (f", in queue {backend.queue_name}" if backend.queue_name else ""),
            "its disk or database is overloaded, locked or stopped",
            "sluiceway backend list",
            "/ui/map",
            min(since, now - backend.slowest) if stuck else since,
            subject=backend.name,
        )

    def _of_bucket(self, name: str, throttled: float, now: Millis) -> Finding | None:
        since = self._lasts(f"throttled {name}", throttled >= t.THROTTLED, now)
        if since is None or now - since < t.STARTS_AFTER:
            return None
        message = f"the bucket of {name} refuses {throttled:.0%} of its requests, because there are too many"
        cause = "more requests a second than it allows for an object, a folder or an account"
        return Finding("bucket_throttled", "warning", message, cause, "sluiceway backend list", "/ui/map", since, subject=name)

    def _of_upgrade(self, sample: InstanceSample) -> Finding | None:
        since = self._lasts("upgrade", sample.reachable_level > sample.level, sample.at)
        if since is None or sample.at - since < t.UPGRADE_OPEN:
            return None
        message = f"the upgrade to compatibility level {sample.reachable_level} is not finalized"
        cause = f"all instances understand it; until it is finalized, they work at level {sample.level}, without what is new"
        return Finding("upgrade_open", "warning", message, cause, "sluiceway upgrade finalize", "/ui/instances", since, subject="upgrade")

    def _lasts(self, name: str, holds: bool, now: Millis) -> Millis | None:
        """Since when that has held in every sample; None: it does not hold."""
        if not holds:
            self._since.pop(name, None)
            return None
        return self._since.setdefault(name, now)

    # ---- findings ---------------------------------------------------------------------------------------------

    def problems(self) -> list[Problem]:
        """What is wrong as of the last samples, most severe first."""
        found = [self._told(each, "") for each in self._own]
        found += [self._told(each, queue.facts.queue_name) for queue in self._queues.values() for each in queue.problems]
        return ranked(found)

    def _told(self, each: _Open, queue_name: str) -> Problem:
        finding = each.finding
        return Problem(
            finding.kind,
            finding.severity,
            finding.subject or queue_name,
            queue_name,
            finding.message,
            finding.cause,
            finding.command,
            finding.page,
            each.since,
            self.instance,
        )
