"""Circuit breaker of a queue: while most items fail, only probes are leased, so that a dependency that is down does not use up attempts.

A pure machine, one per logical queue. Its partitions report what becomes of leased items (`completed`, `failed`, `returned`). The
scheduling cycle calls `judge`, leases up to `room` items, and reports the leases (`leased`). It is kept in memory: after a restart it is
closed. A report is evidence even if the commit that goes with it is refused: those items failed all the same.

*Closed*: an excess of failures is counted. A failure adds 1; a completion subtracts what makes `failure_rate` come out even, down to 0.
At `failures` it opens. So `failures` failures in a row open it, however many items were completed before, and a queue whose share of
failures stays below `failure_rate` stays closed.
*Open*: nothing is leased until `probe_at`. *Half-open*: up to PROBES items are. If fewer than `failure_rate` of them fail, it closes;
otherwise it opens again, for twice as long.
"""

from __future__ import annotations

from typing import Literal

from sluiceway.contract.queue_settings import CircuitBreaker
from sluiceway.kernel.clock import Millis

CircuitState = Literal["closed", "open", "half_open"]

FIRST_WAIT: Millis = 1_000
LONGEST_WAIT: Millis = 60_000
"""Milliseconds that it stays open: at first, and at most (doubling). The second bounds the delay after the dependency is back."""

PROBES = 5
"""Items leased while half-open. With one, a single bad item at the head of the queue would keep the breaker open."""


class Circuit:
    """One logical queue's breaker."""

    def __init__(self, rule: CircuitBreaker) -> None:
        self.rule = rule
        self.state: CircuitState = "closed"
        self.since: Millis = 0
        """When it opened; meaningless while closed."""
        self.probe_at: Millis = 0
        """While open: when it becomes half-open."""
        self._forgives = rule.failure_rate / (1 - rule.failure_rate)
        """Failures that one completion outweighs."""
        self._excess = 0.0
        self._wait = FIRST_WAIT
        """How long it stays open next time. Starts over once the excess is 0."""
        self._completed = self._failed = 0
        """Closed: outcomes that `judge` has not seen."""
        self._round = 1
        """Number of the probes that decide: those of an earlier round have been judged."""
        self._out = self._passed = self._faulty = 0
        """Of this round: items leased, and their outcomes."""
        self._answer_by: Millis = 0
        """When the round's probes are no longer waited for."""

    # ---- reports ----------------------------------------------------------------------------------------------

    def completed(self, items: int, probe: int) -> None:
        """Report completed items. `probe`: their lease's, as returned by `leased`; 0: an ordinary lease."""
        if self.state == "closed":
            self._completed += items
        elif probe == self._round:
            self._passed += items

    def failed(self, items: int, probe: int) -> None:
        """Report items that were retried or are dead, or whose lease ran out."""
        if self.state == "closed":
            self._failed += items
        elif probe == self._round:
            self._faulty += items

    def returned(self, items: int, probe: int) -> None:
        """Report items that were given back unprocessed: no evidence, and others may be probed instead."""
        if probe == self._round:
            self._out = max(0, self._out - items)

    @property
    def spares(self) -> bool:
        """Whether a retry reported just now does not count as an attempt: the breaker is open, or is about to be."""
        return self.state != "closed" or self._excess_with_reports() >= self.rule.failures

    # ---- scheduling cycle -------------------------------------------------------------------------------------

    def judge(self, now: Millis) -> None:
        """Draw the conclusions from the reports and the time, before items are leased."""
        if self.state == "closed":
            if self._completed or self._failed:
                self._judge_outcomes(now)
        else:
            is_late = self.state == "half_open" and self._out > 0 and now >= self._answer_by
            if is_late:
                # Their consumers are still at work, or a partition has gone to another instance. Late answers count.
                self._out = 0
            if self._passed or self._faulty:
                self._judge_probes(now)
            elif is_late:
                self._open(now)
        if self.state == "open":
            # The clock may have been set back.
            self.probe_at = min(self.probe_at, now + self._wait)
            if self.probe_at <= now:
                self.state = "half_open"

    @property
    def room(self) -> int | None:
        """How many items may be leased now; None: any number."""
        if self.state == "closed":
            return None
        return max(0, PROBES - self._out) if self.state == "half_open" else 0

    def leased(self, items: int, timeout: Millis, now: Millis) -> int:
        """Report a lease. Returns the number by which its outcomes are reported: 0 for an ordinary one."""
        if self.state == "closed":
            return 0
        self._out += items
        # No longer for a long lease, whose consumer may be gone.
        self._answer_by = max(self._answer_by, now + min(timeout, LONGEST_WAIT))
        return self._round

    @property
    def wake_at(self) -> Millis | None:
        """When `judge` has to be called without a report."""
        if self.state == "open":
            return self.probe_at
        return self._answer_by if self.state == "half_open" and self._out else None

    # ---- conclusions ------------------------------------------------------------------------------------------

    def _excess_with_reports(self) -> float:
        # One sum for the whole cycle: the order of the outcomes within a call means nothing.
        return max(0.0, self._excess + self._failed - self._completed * self._forgives)

    def _judge_outcomes(self, now: Millis) -> None:
        self._excess = self._excess_with_reports()
        self._completed = self._failed = 0
        if self._excess >= self.rule.failures:
            self.since = now
            self._open(now)
        elif not self._excess:
            self._wait = FIRST_WAIT

    def _judge_probes(self, now: Millis) -> None:
        """Decide as soon as the outcomes still missing cannot change the decision."""
        items = max(self._out, self._passed + self._faulty)
        if self._faulty >= self.rule.failure_rate * items:
            self._end_round()
            self._open(now)
        elif self._passed > (1 - self.rule.failure_rate) * items:
            self._end_round()
            self.state = "closed"
            # On probation: half as many failures open it again, for longer than before.
            self._excess = self.rule.failures / 2

    def _end_round(self) -> None:
        self._round += 1
        self._out = self._passed = self._faulty = 0

    def _open(self, now: Millis) -> None:
        self.state, self._answer_by = "open", 0
        self.probe_at = now + self._wait
        self._wait = min(2 * self._wait, LONGEST_WAIT)
