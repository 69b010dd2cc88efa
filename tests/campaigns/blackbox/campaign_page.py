"""The page about a campaign: a picture of the whole, and of each round and item with which something was wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from tests.campaigns.blackbox import item_stories, pictures
from tests.campaigns.blackbox.campaign import Judged
from tests.campaigns.blackbox.checkers import Anomaly
from tests.campaigns.blackbox.item_stories import SETTLEMENTS
from tests.campaigns.blackbox.operation_log import Fault, Operation
from tests.campaigns.blackbox.waits import overlap

MAX_PICTURED = 6
"""Anomalies of a round of which a picture is made."""
WIDTH = 10.0
"""Seconds that a point of the picture of a whole campaign stands for."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1f2328; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100% }
table { border-collapse: collapse }
td, th { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #d1d9e0 }
.wrong { color: #cf222e } code { font-size: .9em }
"""


class Course:
    """The campaign on one target, as far as it has come: what the page about it needs, and no whole histories."""

    def __init__(self, storage: str, seed: int, folder: Path, left_out: Sequence[str]) -> None:
        self.anomalies: list[Anomaly] = []
        self._storage = storage
        self._seed = seed
        self._folder = folder
        self._left_out = left_out
        self._seconds = 0.0
        self._counts: Counter[str] = Counter()
        self._faults: list[Fault] = []
        self._parts: list[pictures.Slice] = []
        self._rows: list[tuple[object, ...]] = []
        self._sections: list[str] = []

    def add(self, judged: Judged) -> str:
        """Take a round; a line about it. Pictures are made of the first round, and of those with anomalies."""
        round, counts = judged.round, count(judged.round.operations)
        self.anomalies += judged.anomalies
        self._seconds = judged.seconds
        self._counts += counts
        self._faults += round.faults
        self._parts += pictures.slices(round.operations, WIDTH)
        faults = ", ".join(each.kind for each in round.faults) or "none"
        self._rows.append((judged.number, counts["calls"], faults, len(judged.anomalies), judged.history.name))
        if judged.anomalies or judged.number == 1:
            self._sections += _section(judged, self._folder)
        waited = overlap(round.waits, round.began, round.ended)
        starved = f"; {waited:.0f} s without a processor" if waited >= 1.0 else ""
        return f"round {judged.number}: {told(counts)}; faults: {faults}{starved}; {len(judged.anomalies)} anomalies"

    def summary(self) -> str:
        """One line."""
        faults = f"{len(self._faults)} faults of {len({each.kind for each in self._faults})} kinds"
        course = f"{self._storage}: {len(self.anomalies)} anomalies in {len(self._rows)} rounds, {self._seconds:.0f} s"
        return f"{course}, {faults}; {told(self._counts)}"

    def write(self) -> Path:
        """Write the page; its path."""
        pictures.draw_timeline(self._parts, self._faults, self.anomalies, self._folder / "campaign.svg", WIDTH)
        body = [
            page_head(f"Black-box campaign on {self._storage}"),
            f"<p>{escape(self.summary())}. Seed {self._seed}.</p>",
            *(f"<p>Left out on this machine: {escape(each)}</p>" for each in self._left_out),
            page_image("campaign.svg", "Calls, latencies and faults of the whole campaign"),
            "<h2>Faults</h2>",
            page_table(("fault", "times"), sorted(Counter(each.kind for each in self._faults).items())),
            "<h2>Rounds</h2>",
            page_table(("round", "calls", "faults", "anomalies", "history"), self._rows),
            *self._sections,
        ]
        page = self._folder / "index.html"
        page.write_text("\n".join(body) + "\n")
        return page


class Found(NamedTuple):
    """How a planted bug was found. No kind: it was not."""

    bug: str
    about: str
    storage: str
    kind: str
    text: str
    seconds: float


def write_bank(bugs: Sequence[Found], folder: Path) -> Path:
    """The page about planted bugs, beside the folders of their campaigns; its path."""
    rows = [
        (each.bug, each.about, each.storage, each.kind or "not found", f"{each.seconds:.0f} s" if each.kind else "", each.text)
        for each in bugs
    ]
    links = "".join(f'<li><a href="{escape(each.bug)}/index.html">{escape(each.bug)}</a></li>' for each in bugs)
    page = folder / "index.html"
    table = page_table(("bug", "what it does", "storage", "found as", "after", "what was seen"), rows)
    body = [page_head("Planted bugs"), table, f"<ul>{links}</ul>"]
    page.write_text("\n".join(body) + "\n")
    return page


def count(operations: Sequence[Operation]) -> Counter[str]:
    """Calls, and the items that were produced, delivered and settled."""
    found = Counter({"calls": len(operations)})
    for each in operations:
        if each.call == "lease":
            found["delivered"] += len(each.got.get("items", ()))
        elif each.outcome == "done" and each.call == "produce":
            found["produced"] += len(each.given["names"])
        elif each.outcome == "done" and each.call in SETTLEMENTS:
            found[each.call] += len(each.given["ids"])
    return found


def told(counts: Counter[str]) -> str:
    items = ", ".join(f"{counts[name]:,} {name}" for name in ("produced", "delivered", *SETTLEMENTS) if counts[name])
    return f"{counts['calls']:,} calls; items: {items}"


def _section(judged: Judged, folder: Path) -> list[str]:
    """A round: its timeline, what was wrong, and the stories of the first items with which something was."""
    name = f"round-{judged.number:03}"
    pictures.draw_timeline(pictures.slices(judged.round.operations), judged.round.faults, judged.anomalies, folder / f"{name}.svg")
    found = [f"<h2>Round {judged.number}</h2>", page_image(f"{name}.svg", f"Calls, latencies and faults of round {judged.number}")]
    if judged.anomalies:
        found.append(page_table(("anomaly", "what"), [(each.kind, each.text) for each in judged.anomalies[:100]], "wrong"))
    stories = item_stories.tell(judged.round) if judged.anomalies else {}
    pictured = [each for each in judged.anomalies if each.subject in stories][:MAX_PICTURED]
    for number, each in enumerate(pictured):
        path = folder / f"{name}-item-{number}.svg"
        pictures.draw_story(stories[each.subject], each, judged.round, path)
        found.append(page_image(path.name, f"{each.kind}: {each.subject}"))
    return found


def page_head(title: str) -> str:
    about = escape(title)
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{about}</title><style>{_STYLE}</style><h1>{about}</h1>'


def page_image(name: str, about: str) -> str:
    return f'<p><img src="{escape(name)}" alt="{escape(about)}"></p>'


def page_table(head: Sequence[str], rows: Sequence[Sequence[object]], kind: str = "") -> str:
    cells = "".join(f"<th>{escape(each)}</th>" for each in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(str(each))}</td>" for each in row) + "</tr>" for row in rows)
    return f'<table class="{kind}"><tr>{cells}</tr>{lines}</table>'
