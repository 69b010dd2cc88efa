"""The rules on a queue: each looks at its last samples and says what is wrong, or None. `is_open`: whether it said so before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from sluiceway.contract.problem_answers import Kind
from sluiceway.core.partition.held_keys import Holder
from sluiceway.core.problems import thresholds as t
from sluiceway.core.problems.findings import Finding, consumers, items, rate, seconds
from sluiceway.core.problems.observations import QueueFacts
from sluiceway.core.problems.window import Window
from sluiceway.kernel.clock import Millis

Rule = Callable[[QueueFacts, Window, bool], Finding | None]


def _page(facts: QueueFacts, tab: str = "") -> str:
    return f"/ui/queues/{facts.queue_name}{tab}"


# ---- consumption ------------------------------------------------------------------------------------------------------


def no_consumer(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """Items are ready, and nobody takes or holds any."""
    now = window.now
    if not now.servable or now.leased or now.waiting or "lease" in facts.paused or facts.is_dead_queue or window.waiting_since is None:
        return None
    if now.circuit_since is not None:
        return None
    if len(now.unserved) == now.partitions or now.slowest >= t.STUCK_COMMIT:
        # Consumers could not take any if they were there.
        return None
    since = max(window.waiting_since, window.active_at or 0)
    if now.at - since < max(t.NO_CONSUMER_AFTER, 2 * window.habit):
        return None
    known = window.active_at is not None
    return Finding(
        "no_consumer",
        "warning",
        f"{items(now.ready)} ready, and no consumer has requested any for {seconds(now.at - since)}",
        "the consumers have stopped, or use another queue name" if known else "no consumer has requested items since this server started",
        f"sluiceway consumer list {facts.queue_name}",
        _page(facts, "/consumers"),
        since,
    )


def queue_paused(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """The queue is paused, and that has a consequence: items wait, or calls are refused."""
    now, since = window.now, window.paused_since
    leases, produces = since.get("lease"), since.get("produce")
    refused = window.refused(t.MEMORY).get("queue_paused", 0)
    causes: list[str] = []
    if leases is not None and now.ready and now.at - leases >= t.PAUSED_AFTER:
        causes.append(f"leasing has been paused for {seconds(now.at - leases)}: {items(now.ready)} ready")
    if produces is not None and (
        (refused and now.at - produces >= t.PAUSED_AFTER) or now.at - produces >= t.PAUSE_FORGOTTEN or (causes and leases == produces)
    ):
        told = f"{refused:,} produces were refused in the last minute" if refused else "the queue takes no items"
        causes.append(f"producing has been paused for {seconds(now.at - produces)}: {told}")
    if not causes:
        return None
    begun = min(at for at in (leases, produces) if at is not None)
    return Finding(
        "queue_paused",
        "warning",
        "; ".join(causes),
        "an operator paused it: sluiceway audit list shows who",
        f"sluiceway queue resume {facts.queue_name}",
        _page(facts),
        begun,
    )


def leases_expiring(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """Many leases end by their deadline and not by the consumer."""
    found = next((each for span in (t.WINDOW, t.EXPIRY_WINDOW) if (each := _expiring(window, span, is_open))), None)
    if found is None:
        return None
    expired, closed, span = found
    return Finding(
        "leases_expiring",
        "warning",
        f"the leases of {items(expired)} ran out in the last {seconds(span)}, {expired * 100 // closed} % of the items whose lease ended",
        "consumers crash, or a handler takes longer than its lease and does not extend it",
        f"sluiceway queue update {facts.queue_name} --lease-timeout 5m",
        _page(facts, "/consumers"),
    )


def _expiring(window: Window, span: Millis, is_open: bool) -> tuple[int, int, Millis] | None:
    """Expired items, all whose lease ended, and the span, if too many expired, and not all at once."""
    expired = window.grown("expired", span)
    closed = expired + sum(window.grown(name, span) for name in ("completed", "retried", "dead", "released"))
    many = expired >= t.MIN_EXPIRED and expired >= t.EXPIRING * closed
    return (expired, closed, span) if many and (is_open or window.changes("expired", span) >= 2) else None


def slow_handlers(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """All consumers hold items for long, and meanwhile more come in than they finish."""
    now, samples = window.now, window.over(t.HELD)
    busy = all(each.servable and each.leased and not each.waiting for each in samples)
    if not busy or not window.covers(t.HELD) or now.servable < t.ROUNDS_WAITING * now.leased:
        return None
    held = sum(window.held(t.HELD).values())
    if held < t.HELD_SHARE * sum(sum(leases.values()) for leases in now.held.values()):
        return None
    third = len(samples) // 3
    grows = samples[0].ready < samples[third].ready < samples[2 * third].ready < now.ready
    if not (grows or (is_open and now.ready > samples[0].ready)):
        return None
    produced, completed = window.grown("produced", t.HELD), window.grown("completed", t.HELD)
    return Finding(
        "slow_handlers",
        "warning",
        f"{consumers(len(now.held))} held {items(held)} for over {seconds(t.HELD)} while {now.ready:,} are ready: "
        f"{rate(produced, t.HELD)} come in, {rate(completed, t.HELD)} are completed",
        "the handlers are slow, or wait for something; more consumers, or faster handlers, would keep up",
        f"sluiceway consumer list {facts.queue_name}",
        _page(facts, "/consumers"),
    )


def consumer_hoarding(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """One consumer sits on items while another waits for some."""
    now, samples = window.now, window.over(t.HELD)
    if not window.covers(t.HELD) or not now.waiting or now.servable:
        return None
    held = window.held(t.HELD)
    client = max(held, key=lambda each: (held[each], each), default="")
    if not client or held[client] < t.MIN_HOARD or held[client] < t.HELD_SHARE * sum(samples[0].held.get(client, {}).values()):
        return None
    if facts.order and now.held_keys.get(client, 0) < t.MIN_HOARD:
        # Of a key in order, another consumer could not have any.
        return None
    hungry = [each for each in samples if not each.servable and any(other != client for other in each.waiting)]
    if len(hungry) * 4 < len(samples) * 3:
        return None
    others = len({*now.waiting} - {client})
    return Finding(
        "consumer_hoarding",
        "warning",
        f"consumer {client} has held {items(held[client])} for over {seconds(t.HELD)}, while {consumers(others, 'other ')} no items",
        "it leases more items at a time than it can process",
        f"sluiceway consumer list {facts.queue_name}",
        _page(facts, "/consumers"),
        subject=client,
    )


# ---- outcomes ---------------------------------------------------------------------------------------------------------


def _by_repeats(window: Window) -> float:
    """The share of the window's failures that a few repeated items account for."""
    failed = window.grown("retried", t.WINDOW) + window.grown("dead", t.WINDOW)
    if not failed or len(window.now.repeats) > t.FEW_ITEMS:
        return 0.0
    return min(1.0, window.repeats_since(t.WINDOW) / failed)


def _failing(window: Window, is_open: bool) -> tuple[int, int, Millis] | None:
    """Failed items, outcomes and span, if too many fail. A slow queue is judged over a minute."""
    recent = window.grown("retried", t.WINDOW) + window.grown("dead", t.WINDOW)
    if not recent:
        return None
    for span in (t.WINDOW, t.MEMORY):
        failed = window.grown("retried", span) + window.grown("dead", span)
        outcomes = failed + window.grown("completed", span)
        if outcomes >= t.MIN_OUTCOMES:
            return (failed, outcomes, span) if failed >= (t.FAILING_CLEARS if is_open else t.FAILING) * outcomes else None
    return None


def _others_fail(window: Window) -> bool:
    """Whether more than the repeated items fail."""
    return _failing(window, False) is not None and _by_repeats(window) < t.HELD_SHARE


def _is_poison(holder: Holder, window: Window) -> bool:
    """Whether that item, which fails again and again, is at fault, and not what all items depend on."""
    if _others_fail(window):
        return False
    good = window.grown("completed", t.MEMORY)
    return good >= t.GOOD_PER_POISON or holder.attempts >= t.ENDLESS or holder.behind >= t.MIN_BEHIND


def failure_rate(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """Handlers fail on many items, and not only on a few that always fail."""
    found = _failing(window, is_open)
    if found is None or (_by_repeats(window) >= t.HELD_SHARE and window.grown("completed", t.WINDOW)):
        return None
    failed, outcomes, span = found
    critical = failed >= t.FAILING_CRITICAL * outcomes
    return Finding(
        "failure_rate",
        "critical" if critical else "warning",
        f"{failed * 100 // outcomes} % of the items fail ({rate(failed, span)} retried or dead in the last {seconds(span)})",
        _latest(window) or "something that the handlers depend on fails, or their code is wrong",
        f"sluiceway queue pause {facts.queue_name} --lease",
        _page(facts, "/items"),
    )


def _latest(window: Window) -> str:
    """What the latest attempt failed of, if it is known."""
    return f"the latest: {window.now.failure[:300]}" if window.now.failure else ""


def circuit_open(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """The circuit breaker has opened, and holds items back."""
    since = window.now.circuit_since
    if since is None:
        return None
    return Finding(
        "circuit_open",
        "critical",
        f"the circuit breaker has been open for {seconds(window.now.at - since)}: most items fail, and only probes are leased",
        _latest(window) or "something that the handlers depend on fails",
        f"sluiceway stats {facts.queue_name}",
        _page(facts),
        since,
    )


def poison_item(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """A few items fail again and again, while others are completed. Those that hold up their keys are `key_held_up`."""
    repeats = window.repeats_alone()
    worst = max(repeats, key=lambda each: each.attempts, default=None)
    if worst is None or len(window.now.repeats) > t.FEW_ITEMS:
        return None
    good = window.grown("completed", t.MEMORY)
    if _others_fail(window) or (good < t.GOOD_PER_POISON * len(repeats) and worst.attempts < t.ENDLESS):
        return None
    told = "1 item fails" if len(repeats) == 1 else f"{len(repeats)} items fail"
    return Finding(
        "poison_item",
        "warning",
        f"{told} again and again, up to {worst.attempts} times so far, while {good:,} others were completed in the last minute",
        f"the handlers cannot process it: partition {worst.partition}, first offset {worst.offset}"
        + (f"; {_latest(window)}" if window.now.failure else ""),
        f"sluiceway queue update {facts.queue_name} --max-attempts 5",
        _page(facts, "/items"),
    )


def dead_letters(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """Items have died within the last minute."""
    dead = window.grown("dead", t.DEAD_SHOWN)
    if not dead:
        return None
    died = f"{items(dead)} died in the last minute"
    if facts.dead_queue is None:
        return Finding(
            "dead_letters",
            "warning",
            f"{died} and were dropped, because the queue has no dead queue",
            "they used up their attempts, expired, or were rejected",
            f"sluiceway queue update {facts.queue_name} --dead-queue NAME",
            _page(facts, "/settings"),
        )
    return Finding(
        "dead_letters",
        "warning",
        f"{died} and are in {facts.dead_queue}",
        "they used up their attempts, expired, or were rejected; each has its reason",
        f"sluiceway stats {facts.dead_queue} --reasons",
        _page(facts, "/dead"),
    )


def key_held_up(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """In order: items of a key wait for one of them that fails again and again, or is leased, or waits for its retry, for long."""
    found = [each for each in window.now.held_up if not each.holder.is_failing or _is_poison(each.holder, window)]
    worst = max(found, key=lambda each: (each.holder.is_failing, each.holder.behind), default=None)
    if worst is None:
        return None
    holder, now = worst.holder, window.now.at
    id = f"{facts.incarnation}.{worst.partition}.{holder.origin}"
    find = f"sluiceway search {facts.queue_name} --id {id}"
    if holder.due_at:
        does, cause, command = (
            f"is retried in {seconds(holder.due_at - now)}",
            "it failed, and its retry has a long delay",
            f"{find} --run-now",
        )
    elif holder.leased_at:
        does = f"consumer {holder.client_id} has leased for {seconds(now - holder.leased_at)}"
        cause, command = "its handler is slow or hangs, or the lease has more items than the consumer can process", find
    else:
        does, cause = f"has failed {holder.attempts} times", _latest(window) or "the handlers cannot process it"
        command = f"sluiceway queue update {facts.queue_name} --max-attempts 5"
    others = len(found) - 1
    return Finding(
        "key_held_up",
        "warning",
        f"{items(holder.behind)} of key {worst.key or 'unknown'} in {facts.queue_name} {'waits' if holder.behind == 1 else 'wait'} for "
        f"item {id}, which {does}" + (f"; {others} more {'key is' if others == 1 else 'keys are'} held up" if others else ""),
        cause,
        command,
        _page(facts, f"/items?id={id}"),
        holder.leased_at or None,
        subject=worst.key,
    )


# ---- age, producers, partitions, queries -------------------------------------------------------------------------------


def backlog_age(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """The next item is older than the queue's target."""
    now = window.now
    if not facts.target_age or now.oldest_at is None or now.at - now.oldest_at <= facts.target_age:
        return None
    cause, command = "more items come in than are consumed, or none are consumed", f"sluiceway queue history {facts.queue_name}"
    if now.blocked:
        cause = f"{items(now.blocked)} cannot be leased: an earlier one of the key is leased or waits for a retry, or it is at its limit"
        command = f"sluiceway queue keys {facts.queue_name}"
    return Finding(
        "backlog_age",
        "warning",
        f"{items(now.ready)} ready, and the next one has waited for {seconds(now.at - now.oldest_at)}; the target is "
        f"{seconds(facts.target_age)}",
        cause,
        command,
        _page(facts),
        now.oldest_at + facts.target_age,
    )


def produce_refused(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """Producers get errors from the server, which a pause does not explain."""
    refused = {code: count for code, count in window.refused(t.WINDOW).items() if code != "queue_paused"}
    count = sum(refused.values())
    if count < t.REFUSED_CALLS and not (count and "storage_full" in refused):
        return None
    why = ", ".join(sorted(refused))
    return Finding(
        "produce_refused",
        "critical",
        f"{count:,} produces were refused in the last {seconds(t.WINDOW)}: {why}",
        "the disk is full" if "storage_full" in refused else "the server cannot store them, or too many are waiting",
        "sluiceway doctor",
        _page(facts, "/partitions"),
    )


def partition_unavailable(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """Partitions that this instance has to serve are not open."""
    samples = window.over(t.UNSERVED_AFTER)
    lasting = [number for number in window.now.unserved if all(number in each.unserved for each in samples)]
    if not lasting or not (window.covers(t.UNSERVED_AFTER) or is_open):
        return None
    return Finding(
        "partition_unavailable",
        "critical",
        f"{len(lasting)} of {window.now.partitions} partitions are not served",
        f"partition {lasting[0]}: {window.now.unserved[lasting[0]]}",
        f"sluiceway partition list {facts.queue_name}",
        _page(facts, "/partitions"),
    )


def query_failed(facts: QueueFacts, window: Window, is_open: bool) -> Finding | None:
    """A Spark query on the queue has ended with an error, and does not run again."""
    failed = window.now.failed_queries
    if not failed:
        return None
    each = failed[0]
    name = each.name or each.client_id
    return Finding(
        "query_failed",
        "critical",
        f"the Spark query {name} has failed" + (f", and {len(failed) - 1} more" if len(failed) > 1 else ""),
        each.error[:300],
        f"sluiceway consumer list {facts.queue_name}",
        "/ui/spark",
        min(each.told_at for each in failed),
        subject=name,
    )


RULES: Final[Mapping[Kind, Rule]] = {
    "no_consumer": no_consumer,
    "queue_paused": queue_paused,
    "leases_expiring": leases_expiring,
    "slow_handlers": slow_handlers,
    "consumer_hoarding": consumer_hoarding,
    "failure_rate": failure_rate,
    "circuit_open": circuit_open,
    "poison_item": poison_item,
    "key_held_up": key_held_up,
    "dead_letters": dead_letters,
    "backlog_age": backlog_age,
    "produce_refused": produce_refused,
    "partition_unavailable": partition_unavailable,
    "query_failed": query_failed,
}


def find(facts: QueueFacts, window: Window, is_open: Callable[[Kind], bool]) -> Iterator[Finding]:
    """All that is wrong with the queue in its last sample."""
    for kind, rule in RULES.items():
        finding = rule(facts, window, is_open(kind))
        if finding is not None:
            yield finding
