"""The page about a soak, and its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from tests.campaigns.blackbox.campaign_page import page_head, page_image, page_table
from tests.campaigns.soak import soak_pictures
from tests.campaigns.soak.drift import Judgement, judge, shown
from tests.campaigns.soak.soak_pictures import digits
from tests.campaigns.soak.soak_record import TYPICAL, Judged, SoakRecord, all_series, slowness


class Result(NamedTuple):
    """What a soak has shown."""

    judged: list[tuple[Judged, Judgement]]
    findings: list[str]

    @property
    def over(self) -> list[str]:
        """The names of the series that grow faster than they may."""
        return [each.name for each, verdict in self.judged if verdict.verdict == "over"]

    @property
    def undecided(self) -> list[str]:
        return [each.name for each, verdict in self.judged if verdict.verdict == "undecided"]

    @property
    def is_good(self) -> bool:
        return not self.over and not self.findings


def judged(record: SoakRecord) -> Result:
    """Pure. Where a fixed piece of work took surely longer, too, latencies are not the server's fault alone: they are undecided."""
    is_slower = judge(slowness(record), TYPICAL).verdict == "over"
    found = []
    for each in all_series(record):
        verdict = judge(each.stretches, each.limit)
        if is_slower and each.is_latency and verdict.verdict == "over":
            verdict = verdict._replace(verdict="undecided")
        found.append((each, verdict))
    return Result(found, record.findings)


def rows(result: Result) -> list[tuple[str, ...]]:
    """For the page and the terminal: what, its level, its growth in an hour with the interval, what is allowed, the verdict."""
    found: list[tuple[str, ...]] = []
    for each, verdict in result.judged:
        if verdict.slope is None:
            found.append((each.name, "", "too few points", "", verdict.verdict))
            continue
        places = digits(verdict.slope.level)
        level = f"{verdict.slope.level:,.{places}f} {each.unit}".strip()
        grows = shown(verdict.slope, each.unit, places)
        found.append((each.name, level, grows, f"{verdict.allowed:,.{places}f}", verdict.verdict))
    return found


def told(record: SoakRecord, result: Result) -> str:
    """One line."""
    faults = Counter(each.kind for each in record.faults)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items())) or "none"
    calls = record.beats[-1].calls if record.beats else 0
    grows = f"{len(result.over)} of {len(result.judged)} figures grow too fast"
    doubt = f" ({len(result.undecided)} undecided)" if result.undecided else ""
    course = f"{record.length / 60:.1f} minutes at {record.rate:.0f} of {record.full_rate:.0f} calls/s, {calls:,} calls"
    told = f"{grows}{doubt}, {len(result.findings)} findings; {course}, {record.items:,} items"
    return f"{told}; faults: {kinds}; load {record.load:.1f}, seed {record.seed}"


def write(title: str, record: SoakRecord, result: Result, folder: Path) -> Path:
    """Write the page with its pictures; its path."""
    soak_pictures.draw_course(record, folder / "course.svg")
    soak_pictures.draw_slopes(result.judged, folder / "slopes.svg")
    body = [
        page_head(title),
        f"<p>{escape(told(record, result))}.</p>",
        *([page_table(("finding",), [(each,) for each in result.findings], "wrong")] if result.findings else []),
        page_table(("what", "level", "growth, with 95 % confidence", "allowed an hour", ""), rows(result)),
        "<h2>Slopes</h2>",
        "<p>Dots: medians of five seconds. Line: the slope. Dashed: what was allowed.</p>",
        page_image("slopes.svg", "Each judged series with its slope and its limit"),
        "<h2>Course</h2>",
        page_image("course.svg", "Calls, latencies, memory, handles and files over time, with the faults"),
    ]
    page = folder / "index.html"
    page.write_text("\n".join(body) + "\n")
    return page


class Found(NamedTuple):
    """How a planted leak was found. No series: it was not."""

    leak: str
    about: str
    seen: str
    seconds: float


def write_bank(leaks: Sequence[Found], folder: Path) -> Path:
    """The page about planted leaks, beside the folders of their soaks; its path."""
    table = [(each.leak, each.about, each.seen or "not found", f"{each.seconds:.0f} s") for each in leaks]
    links = "".join(f'<li><a href="{escape(each.leak)}/index.html">{escape(each.leak)}</a></li>' for each in leaks)
    page = folder / "index.html"
    body = [page_head("Planted leaks"), page_table(("leak", "what it does", "what was seen", "in"), table), f"<ul>{links}</ul>"]
    page.write_text("\n".join(body) + "\n")
    return page
