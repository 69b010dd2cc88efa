"""What the history says of each item: when it was sent, delivered and settled, and what of that is certain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from tests.campaigns.blackbox.operation_log import Operation, Outcome, Round

SETTLEMENTS = ("complete", "retry", "dead", "release")
Verdict = Literal["complete", "retry", "dead", "release"]
TICK = "tick/"
"""How the name of an item begins that a schedule has produced: `tick/SCHEDULE@SECONDS`."""


class Delivered(NamedTuple):
    """An item in the answer to a lease, as an operation keeps it."""

    name: str | None
    """None: its bytes are not those of any item."""
    id: str
    origin: str
    lease: str
    deadline: float


class Delivery(NamedTuple):
    began: float
    ended: float
    """The item was leased between these."""
    id: str
    origin: str
    lease: str
    deadline: float
    queue: str
    client: str


class Settlement(NamedTuple):
    began: float
    ended: float
    id: str
    verdict: Verdict
    outcome: Outcome | Literal["ignored"]
    after: float
    """Seconds that a retry asked the item to wait."""
    client: str

    @property
    def may_count(self) -> bool:
        return self.outcome in ("done", "unknown")

    @property
    def ends(self) -> bool:
        """Whether it may have ended the item's life in its queue."""
        return self.may_count and self.verdict in ("complete", "dead")


@dataclass(slots=True)
class Story:
    """One item. What happened to it is in the order of the calls' ends."""

    name: str
    queue: str = ""
    key: str = ""
    """Its key, or its unique key."""
    is_unique: bool = False
    """Whether it has a unique key."""
    due: float = 0.0
    produces: list[Operation] = field(default_factory=list)
    origins: list[tuple[str, float]] = field(default_factory=list)
    """Each place that the item was said to have been stored at first, and when that was said."""
    deliveries: list[Delivery] = field(default_factory=list)
    settlements: list[Settlement] = field(default_factory=list)

    @property
    def stored(self) -> Operation | None:
        """The first call that surely stored it."""
        return next((each for each in self.produces if each.outcome == "done"), None)

    @property
    def is_sent(self) -> bool:
        """Whether it may be there."""
        return any(each.outcome != "refused" for each in self.produces) or self.name.startswith(TICK)

    @property
    def completed(self) -> list[Settlement]:
        """The calls that surely completed it."""
        return [each for each in self.settlements if each.verdict == "complete" and each.outcome == "done"]

    def given_up(self, delivery: Delivery) -> float:
        """When the client of that lease may have given the item up; infinity if it never did."""
        return first(each.began for each in self.settlements if each.id == delivery.id and each.outcome != "refused")


def tell(round: Round) -> dict[str, Story]:
    """The stories of all items of a round, by name."""
    stories: dict[str, Story] = {}
    for operation in sorted(round.operations, key=_end):
        for name, note in _notes(operation):
            story = stories.setdefault(name, Story(name))
            _note(story, operation, note)
    return stories


def _end(operation: Operation) -> float:
    return operation.began if operation.ended is None else operation.ended


def _notes(operation: Operation) -> Iterator[tuple[str, Any]]:
    """The items that the operation is about, each with what it says of it."""
    if operation.call == "produce":
        ids = operation.got.get("ids") or [""] * len(operation.given["names"])
        keys = operation.given.get("item_keys") or operation.given.get("unique_keys") or [""] * len(ids)
        left_out = set(operation.got.get("duplicates", ()))
        for number, (name, id, key) in enumerate(zip(operation.given["names"], ids, keys, strict=True)):
            if number not in left_out:
                yield name, (id, key)
    elif operation.call == "lease":
        for each in operation.got.get("items", ()):
            if each[0] is not None:
                yield each[0], Delivered(*each)
    elif operation.call in SETTLEMENTS:
        for id, name in operation.given["ids"].items():
            yield name, id


def _note(story: Story, operation: Operation, note: Any) -> None:
    ended = _end(operation)
    if operation.call == "produce":
        id, story.key = note
        story.is_unique = "unique_keys" in operation.given
        story.queue, story.due = operation.queue, operation.given.get("due", 0.0)
        story.produces.append(operation)
        if id:
            story.origins.append((id, ended))
    elif operation.call == "lease":
        story.queue = story.queue or operation.queue
        story.origins.append((note.origin, ended))
        story.deliveries.append(
            Delivery(operation.began, ended, note.id, note.origin, note.lease, note.deadline, operation.queue, operation.client)
        )
    else:
        ignored = operation.outcome == "done" and note in operation.got["ignored"]
        outcome: Outcome | Literal["ignored"] = "ignored" if ignored else operation.outcome
        # An item that has used up its attempts is dead, and waits for nothing.
        after = 0.0 if operation.got.get("dead") else operation.given.get("after", 0.0)
        verdict = cast(Verdict, operation.call)
        story.settlements.append(Settlement(operation.began, ended, note, verdict, outcome, after, operation.client))


def first(times: Iterable[float]) -> float:
    """The earliest; infinity if there is none."""
    return min(times, default=float("inf"))
