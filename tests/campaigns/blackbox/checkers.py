"""Checkers: pure functions that find in a history what must not be. What may have been otherwise is not found: each anomaly is certain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, groupby, pairwise
from typing import NamedTuple

from tests.campaigns.blackbox.item_stories import TICK, Delivery, Story, first, tell
from tests.campaigns.blackbox.operation_log import Fault, Round, are_away
from tests.campaigns.blackbox.waits import overlap

HANGOVER = 20.0
"""Seconds after a fault that hangs in which a call that began in it, or right after it, may still end without an answer."""
STARVED = 5.0
"""Seconds without a processor after which an answer may be as late as none: half of the time that a call has beyond its own."""
FIRED_WITHIN = 20.0
"""Seconds before the end of a round from which on a schedule's item may belong to the next one."""
TALLIES = ("total", "transferring")
"""What is still there."""


class Anomaly(NamedTuple):
    """Something that must not be. `at`: when it was so, in seconds since the epoch; 0: only the end of the round shows it."""

    kind: str
    subject: str
    """The item, the queue or the client."""
    at: float
    text: str


Stories = Mapping[str, Story]
Checker = Callable[[Round, Stories], Iterator[Anomaly]]


def check(round: Round) -> list[Anomaly]:
    """All that is wrong with a round, in the order in which it was so."""
    stories = tell(round)
    found = [anomaly for checker in CHECKERS for anomaly in checker(round, stories)]
    return sorted(found, key=lambda each: each.at or round.ended)


# ---- items that are gone ------------------------------------------------------------------------------------------------


def lost(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """An item was stored, and all queues were emptied, and no call can have completed it. Neighbours that are gone together are one
    anomaly, and its kind says where in the line of their partition they were."""
    if not round.is_drained:
        return
    lines: dict[tuple[str, str], list[tuple[float, int, Story]]] = defaultdict(list)
    for story in stories.values():
        if story.stored is not None:
            partition, _, offset = story.origins[0][0].rpartition(".")
            lines[story.queue, partition].append((_stored_at(story), int(offset), story))
    for (queue, partition), line in lines.items():
        # By time first: the places of what is lost at the end may have been given again.
        line.sort(key=lambda each: each[:2])
        flags = [(_is_lost(story), story) for *_, story in line]
        runs = [(gone, [story for _, story in run]) for gone, run in groupby(flags, key=lambda each: each[0])]
        for number, (gone, run) in enumerate(runs):
            if gone:
                after = runs[number + 1][1][0] if number + 1 < len(runs) else None
                yield _lost_run(f"{queue} {partition}", run, after, is_first=number == 0, faults=round.faults)


def _is_lost(story: Story) -> bool:
    return not any(each.verdict == "complete" and each.may_count for each in story.settlements)


def _lost_run(place: str, run: Sequence[Story], after: Story | None, *, is_first: bool, faults: Sequence[Fault]) -> Anomaly:
    stored = [each.stored for each in run]
    last = max(each.ended or 0.0 for each in stored if each is not None)
    until = float("inf") if after is None else _sent_at(after)
    strikes = [each for each in faults if each.ended >= last and each.began <= until][:1]
    if after is None or strikes:
        where = "postfix"
    else:
        where = "prefix" if is_first else "middle"
    struck = f"; then came: {strikes[0].kind}" if strikes else ""
    seen = sum(bool(each.deliveries) for each in run)
    which = run[0].name if len(run) == 1 else f"{len(run)} items, {run[0].name} to {run[-1].name},"
    text = f"{which} stored in {place}, nowhere at the end; delivered before: {seen}{struck}"
    return Anomaly(f"lost {where}", run[0].name, last, text)


def _stored_at(story: Story) -> float:
    return first(each.ended or 0.0 for each in story.produces if each.outcome == "done")


def _sent_at(story: Story) -> float:
    return first(each.began for each in story.produces)


def missed(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """A schedule's time passed, and no item of it was delivered."""
    if not round.is_drained:
        return
    for schedule in dict.fromkeys(each.given["schedule"] for each in round.calls("schedule")):
        since = first(each.ended or 0.0 for each in round.calls("schedule") if each.given["schedule"] == schedule)
        minute = int(max(since, round.began) // 60) + 1
        while minute * 60 <= round.ended - FIRED_WITHIN:
            if f"{TICK}{schedule}@{minute * 60}" not in stories:
                yield Anomaly("lost time", schedule, minute * 60.0, f"schedule {schedule} did not produce its item of minute {minute}")
            minute += 1


# ---- items that are there too often -------------------------------------------------------------------------------------


def doubled(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """An item was stored at two places, or completed twice; or two items were stored at one place."""
    owners: dict[str, str] = {}
    for story in stories.values():
        places = list(dict(story.origins))
        if len(places) > 1:
            at = max(dict(reversed(story.origins)).values())
            yield Anomaly("doubled", story.name, at, f"{story.name} was stored {len(places)} times: {', '.join(places)}")
        if len(story.completed) > 1:
            ids = ", ".join(each.id for each in story.completed)
            text = f"{story.name} was completed {len(story.completed)} times: {ids}"
            yield Anomaly("doubled", story.name, story.completed[1].ended, text)
        for place in places:
            other = owners.setdefault(place, story.name)
            if other != story.name:
                yield Anomaly("doubled", story.name, dict(story.origins)[place], f"{place} was given to {other} and to {story.name}")


def resurrected(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """A lease that began after an item was surely completed delivered it."""
    for story in stories.values():
        over = first(each.ended for each in story.completed)
        for each in story.deliveries:
            if each.began > over:
                text = f"{story.name} was completed, and {each.began - over:.2f} s later {each.client} asked and got it as {each.id}"
                yield Anomaly("resurrected", story.name, each.ended, text)
                break


def invented(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """Something was delivered that was never sent, or whose produce was refused, or that is not as it was sent."""
    unknown = {story.name for story in stories.values() if not story.produces and not story.is_sent}
    left = unknown if len(unknown) <= _rest(round) else set()
    for operation in round.calls("lease"):
        for name, id, *_ in operation.got.get("items", ()):
            if name is None:
                yield Anomaly("torn", id, operation.ended or 0.0, f"{id} of {operation.queue} has bytes that were never sent")
            elif not stories[name].is_sent and name not in left:
                how = "was refused" if stories[name].produces else "was never sent, not in this round"
                yield Anomaly("invented", name, operation.ended or 0.0, f"{name} {how}, and {operation.client} got it as {id}")


def _rest(round: Round) -> float:
    """How many items an earlier round had left in the queues, at most."""
    if are_away(round.before):
        return float("inf")
    return sum(counts.get(each, 0) for counts in round.before.values() for each in TALLIES)


def torn_calls(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """Of the items of one produce without item keys, which is stored in one piece, some are there and others are not."""
    if not round.is_drained:
        return
    for operation in round.calls("produce"):
        if operation.outcome == "unknown" and not {"item_keys", "unique_keys"} & operation.given.keys():
            there = [bool(stories[name].deliveries) for name in operation.given["names"]]
            if any(there) and not all(there):
                text = f"of the {len(there)} items of a produce of unknown outcome, {sum(there)} are there"
                yield Anomaly("torn", operation.given["names"][0], operation.ended or 0.0, text)


# ---- leases -------------------------------------------------------------------------------------------------------------


def leased_twice(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """Two leases of one item overlapped: both had been answered when neither had run out, nor had its client given the item up."""
    deadlines: dict[str, float] = defaultdict(float)
    for operation in round.calls("extend"):
        for lease, deadline in operation.got.get("deadlines", {}).items():
            deadlines[lease] = max(deadlines[lease], deadline)
    for story in stories.values():
        # The same lease may be told twice, to a client that has lost the answer.
        holds = list({each.lease: each for each in reversed(story.deliveries)}.values())
        for one, other in combinations(holds, 2):
            until = min(_held_until(story, each, deadlines[each.lease]) for each in (one, other))
            since = max(one.ended, other.ended)
            if since < until:
                text = f"{story.name} was leased to {one.client} ({one.lease}) and {other.client} ({other.lease}) for {until - since:.2f} s"
                yield Anomaly("leased twice", story.name, since, text)
                break


def _held_until(story: Story, delivery: Delivery, extended: float) -> float:
    return min(max(delivery.deadline, extended), story.given_up(delivery))


def early(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """An item was delivered before it was due, or before the time for which a retry had put it back."""
    for story in stories.values():
        due = [(0.0, story.due, "due")] if story.due else []
        if story.name.startswith(TICK):
            due = [(0.0, float(story.name.rpartition("@")[2]), "its schedule's time")]
        due += [(each.ended, each.began + each.after, "its retry") for each in story.settlements if _puts_off(each.verdict, each.outcome)]
        for since, until, what in due:
            for each in story.deliveries:
                if each.began > since and each.ended < until:
                    yield Anomaly("early", story.name, each.ended, f"{story.name} was delivered {until - each.ended:.2f} s before {what}")
                    break


def _puts_off(verdict: str, outcome: str) -> bool:
    return verdict == "retry" and outcome == "done"


def out_of_order(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """An item was delivered before the one ahead of it, of the same key, could be settled."""
    keys: dict[tuple[str, str], list[Story]] = defaultdict(list)
    for story in stories.values():
        if story.key and not story.is_unique and story.stored is not None:
            keys[story.queue, story.key].append(story)
    for (_, key), line in keys.items():
        line.sort(key=_sent_at)
        for ahead, behind in pairwise(line):
            settled = first(each.began for each in ahead.settlements if each.ends)
            delivered = first(each.ended for each in behind.deliveries)
            if _stored_at(ahead) <= _sent_at(behind) and delivered < settled:
                text = f"{behind.name} of key {key} was delivered before {ahead.name} was settled"
                yield Anomaly("out of order", behind.name, delivered, text)


def not_unique(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """An item was stored although another one with its unique key was there all the time."""
    keys: dict[tuple[str, str], list[Story]] = defaultdict(list)
    for story in stories.values():
        if story.is_unique and story.stored is not None:
            keys[story.queue, story.key].append(story)
    for (_, key), line in keys.items():
        line.sort(key=_sent_at)
        for number, ahead in enumerate(line):
            settled = first(each.began for each in ahead.settlements if each.ends)
            for behind in line[number + 1 :]:
                if _stored_at(ahead) < _sent_at(behind) and _stored_at(behind) < settled:
                    text = f"{behind.name} was stored while {ahead.name} had its unique key {key}"
                    yield Anomaly("not unique", behind.name, _stored_at(behind), text)


# ---- calls --------------------------------------------------------------------------------------------------------------


def never_ended(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """A call got no answer in its time, although nothing that hangs was done to the server, and it had a processor."""
    for each in round.operations:
        if each.ended is None or each.problem == "no answer":
            until = each.ended or round.ended
            hung = any(fault.hangs and _overlap(fault, each.began - HANGOVER, until) for fault in round.faults)
            if not hung and overlap(round.waits, each.began, until) < STARVED:
                text = f"{each.call} of {each.client} at {each.at} has no answer after {until - each.began:.1f} s"
                yield Anomaly("never ended", each.client, until, text)


def wrong_answers(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """An answer that this call must not get, a completion that was not counted, or what a fault's own examination has found."""
    for each in round.operations:
        if each.problem.startswith("unexpected"):
            yield Anomaly("wrong answer", each.client, each.ended or 0.0, f"{each.call} of {each.client}: {each.problem}")
        elif each.call == "complete" and each.outcome == "done":
            expected = len(each.given["ids"]) - len(each.got["ignored"])
            if each.got["completed"] != expected:
                text = f"completed {each.got['completed']} of {len(each.given['ids'])}, and ignored {len(each.got['ignored'])}"
                yield Anomaly("wrong answer", each.client, each.ended or 0.0, text)
    for text in round.observed:
        yield Anomaly("wrong answer", "examination", 0.0, text)


def _overlap(fault: Fault, began: float, ended: float) -> bool:
    return fault.began <= ended and began <= fault.ended


# ---- the books ----------------------------------------------------------------------------------------------------------


def stuck(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """All faults were over, and yet the queues were not emptied."""
    if not round.is_drained:
        left = {queue: sum(counts[each] for each in TALLIES) for queue, counts in round.after.items()}
        told = ", ".join(f"{count} of {queue}" for queue, count in left.items() if count) or "nothing that is counted"
        yield Anomaly("stuck", "queues", 0.0, f"the queues could not be emptied; left: {told}")


def books(round: Round, stories: Stories) -> Iterator[Anomaly]:
    """What the server has counted in this round is not what it has answered."""
    if not round.is_drained or are_away(round.after):
        return
    for queue, now in round.after.items():
        came = now["produced"] + now["moved_in"]
        went = sum(now[name] for name in ("completed", "dead", "cleared", "redriven", "moved", *TALLIES))
        if came != went:
            yield Anomaly("books", queue, 0.0, f"of {queue}, {came} came and {went} went or are there: {dict(now)}")
    moved = {queue for queue, now in round.after.items() if now["moved"] or now["moved_in"]} | {
        each.queue for each in round.calls("rebalance")
    }
    rest = _rest(round)
    if rest < float("inf"):
        yield from _completions(round, moved)
    if not rest:
        yield from _arrivals(round, stories, moved)


def _new(round: Round, queue: str, counter: str) -> int:
    return round.after[queue][counter] - round.before.get(queue, {}).get(counter, 0)


def _completions(round: Round, moved: set[str]) -> Iterator[Anomaly]:
    for queue in round.after.keys() - moved:
        calls = [each for each in round.calls("complete") if each.queue == queue]
        sure = sum(each.got["completed"] for each in calls if each.outcome == "done")
        most = sure + sum(len(each.given["ids"]) for each in calls if each.outcome == "unknown")
        counted = _new(round, queue, "completed")
        if not sure <= counted <= most:
            yield Anomaly("books", queue, 0.0, f"{queue} counts {counted} as completed, and has answered {sure} to {most}")


def _arrivals(round: Round, stories: Stories, moved: set[str]) -> Iterator[Anomaly]:
    """Dead and redriven items arrive once more: a queue and its dead queue are looked at together.

    A schedule may produce between two rounds, so its queue is left out.
    """
    scheduled = {each.queue for each in round.calls("schedule")}
    for queue in round.after.keys() - moved - scheduled:
        family = [name for name in (queue, f"{queue}-dead") if name in round.after]
        if queue.endswith("-dead") or moved & set(family):
            continue
        own = [each for each in stories.values() if each.queue in family]
        landed = sum(each.stored is not None or bool(each.deliveries) for each in own)
        # Without a dead queue, what dies arrives nowhere.
        counters = ("dead", "redriven") if len(family) > 1 else ("redriven",)
        again = sum(_new(round, name, counter) for name in family for counter in counters)
        counted = sum(_new(round, name, "produced") for name in family)
        if counted != landed + again:
            text = f"{' and '.join(family)} count {counted} items; {landed} landed, and {again} died or were redriven"
            yield Anomaly("books", queue, 0.0, text)


CHECKERS: Sequence[Checker] = (
    lost,
    missed,
    doubled,
    resurrected,
    invented,
    torn_calls,
    leased_twice,
    early,
    out_of_order,
    not_unique,
    never_ended,
    wrong_answers,
    stuck,
    books,
)
