"""The judge of `volume` finds what it is there for: a lost, a doubled, a changed item, and memory that grows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tests.campaigns.kit.report import Report
from tests.campaigns.spark.memory_curves import Curve
from tests.campaigns.spark.volume import DEAD_OF, SIZE, digests_of, judge_ledger, judge_memory, write_files

COUNT = 3 * DEAD_OF


def found(folder: Path, sabotage: str) -> list[str]:
    """What the judge says of a ledger in which that is wrong."""
    sent = write_files(folder / "in", COUNT)
    lines = [line.rstrip(b"\n") for path in sorted((folder / "in").iterdir()) for line in path.open("rb")]
    assert {len(line) for line in lines} == {SIZE}
    kept = [line for number, line in enumerate(lines) if number % DEAD_OF]
    dead = lines[::DEAD_OF]
    match sabotage:
        case "lost":
            del kept[5]
        case "twice":
            kept.append(kept[7])
        case "changed":
            kept[9] = kept[9][:-3] + (b"x" if kept[9][-3:-2] != b"x" else b"y") + kept[9][-2:]
        case "short":
            kept[11] = kept[11][:-1]
        case "not dead":
            kept.append(dead.pop())
        case "foreign":
            kept.append(kept[0].replace(b"0000000001", b"0000099999"))
    report = Report("volume")
    judge_ledger(report, sent, digests_of(pa.array(kept, pa.binary())), digests_of(pa.array(dead, pa.binary())))
    return report.wrong


@pytest.mark.parametrize(
    ("sabotage", "told"),
    [
        ("lost", ["the archive lacks: 1 items, such as [6]"]),
        ("twice", ["the archive has twice: 1 items, such as [8]"]),
        ("changed", ["the archive has changed: 1 items, such as [10]"]),
        ("short", ["1 items in the archive are not of 1024 bytes", "the archive lacks: 1 items, such as [12]"]),
        ("not dead", ["the archive has what it should not have: 1 items, such as [2000]", "the dead queue lacks: 1 items, such as [2000]"]),
        ("foreign", ["the archive has ids that nobody sent", "the archive has what it should not have: 1 items, such as [99999]"]),
        ("nothing", []),
    ],
)
def test_the_ledger(tmp_path: Path, sabotage: str, told: list[str]) -> None:
    assert found(tmp_path, sabotage) == told


def test_memory_that_grows_is_found_and_memory_that_swings_is_not() -> None:
    seconds = [float(second) for second in range(90)]
    swings = Curve(seconds, [300.0 + 100 * (second % 7) / 7 for second in seconds])
    grows = Curve(seconds, [300.0 + 4 * second for second in seconds])
    for part in ("server", "workers", "heap after collections"):
        for curve, wrong in ((swings, 0), (grows, 1)):
            report = Report("volume")
            judge_memory(
                report, "process", {"server": swings, "workers": swings, "heap after collections": swings} | {part: curve}, 1_000_000
            )
            assert len(report.wrong) == wrong
    # So does what has only begun, which is not judged.
    report = Report("volume")
    short = Curve(seconds[:20], grows.mib[:20])
    judge_memory(report, "process", {"server": short, "workers": short, "heap after collections": short}, 1_000_000)
    assert report.wrong == []
