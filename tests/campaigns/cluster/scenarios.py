"""How a campaign goes through its scenarios, and what it says at the end."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from tests.campaigns.cluster.report import Report

Campaign = TypeVar("Campaign")


def conduct(
    name: str,
    given: argparse.Namespace,
    scenarios: Mapping[str, Callable[[Campaign, Report], None]],
    begin: Callable[[Path, ExitStack], Campaign],
    more: str = "",
) -> int:
    """Runs those of `scenarios` that `given` names, or all, and sums them up; returns the exit code. `given` has `keep`, and may have
    `json`. `more`: for the last line.
    """
    # Whoever ends it this way is to find no process that it has left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reports: list[Report] = []
    begun = time.monotonic()
    with ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"sluiceway-{name}-")))
        folder.mkdir(parents=True, exist_ok=given.keep is None)
        campaign = begin(folder, stack)
        for each in given.scenarios or scenarios:
            reports.append(report := Report(each))
            try:
                scenarios[each](campaign, report)
            except Exception as error:
                report.fail(repr(error))
            report.say(f"ended after {report.seconds:.0f} s")
    seconds = time.monotonic() - begun
    return as_json(reports, seconds) if getattr(given, "json", False) else summed_up(reports, seconds, more)


def summed_up(reports: list[Report], seconds: float, more: str = "") -> int:
    """Prints what was wrong, and the line at the end; returns the exit code."""
    wrong = [f"{report.name}: {line}" for report in reports for line in report.wrong]
    for line in wrong[:40]:
        print(f"WRONG {line}")
    told = [f"{report.name}: {'; '.join(report.figures) or 'nothing measured'}" for report in reports]
    missed = [f"{report.name}: {line}" for report in reports for line in report.missed]
    if missed:
        told.append(f"aims missed: {'; '.join(missed)}")
    print(" | ".join([f"{'FAILED' if wrong else 'ok'}: {len(wrong)} wrong in {len(reports)} scenarios, {seconds:.0f} s{more}", *told]))
    return 1 if wrong else 0


def as_json(reports: list[Report], seconds: float) -> int:
    """The same as `summed_up`, for programs."""
    wrong = sum(len(report.wrong) for report in reports)
    scenarios = {report.name: {"wrong": report.wrong, "figures": report.figures, "missed": report.missed} for report in reports}
    print(json.dumps({"ok": not wrong, "wrong": wrong, "seconds": round(seconds), "scenarios": scenarios}, ensure_ascii=False))
    return 1 if wrong else 0
