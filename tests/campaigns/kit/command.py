"""A campaign's command line: the scenarios that it has, how it goes through them, and what it says at the end."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from inspect import isfunction
from pathlib import Path
from typing import ClassVar, Self

from tests.campaigns.kit.report import Report


class Campaign:
    """Each public method is a scenario, and its docstring the help about it. Each has servers, or processes, and a folder of its own."""

    name: ClassVar[str]
    """`make test-NAME` runs it."""

    def __init__(self, given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        """`stack`: for what all scenarios share, and what ends with the campaign."""
        self._given = given
        self._folder = folder

    @classmethod
    def scenarios(cls) -> dict[str, Callable[[Self, Report], None]]:
        return {name: each for name, each in vars(cls).items() if isfunction(each) and not name.startswith("_")}

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        about = sys.modules[cls.__module__].__doc__
        parser = argparse.ArgumentParser(
            prog=f"make test-{cls.name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        told = "; ".join(f"{name}: {scenario.__doc__}" for name, scenario in cls.scenarios().items())
        names = [*cls.scenarios(), []]
        parser.add_argument("scenarios", nargs="*", choices=names, default=[], help=f"all if none is named. {told}")
        cls._add_options(parser)
        parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
        parser.add_argument("--keep", type=Path, help="a folder, made anew, that keeps logs and data")
        return parser

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of this campaign."""

    @classmethod
    def run(cls) -> int:
        """Run the scenarios that the command line names, or all. Returns the exit code."""
        given = cls.parser().parse_args()
        # SIGTERM unwinds the stack, so that no server outlives the campaign.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        reports: list[Report] = []
        begun = time.monotonic()
        with ExitStack() as stack:
            folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"sluiceway-{cls.name}-")))
            folder.mkdir(parents=True, exist_ok=given.keep is None)
            campaign = cls(given, folder.resolve(), stack)
            for each in given.scenarios or cls.scenarios():
                reports.append(report := Report(each))
                try:
                    cls.scenarios()[each](campaign, report)
                except Exception as error:
                    report.fail(repr(error))
                report.say(f"ended after {report.seconds:.0f} s")
        seconds = time.monotonic() - begun
        return as_json(reports, seconds) if given.json else summed_up(reports, seconds, f", seed {given.seed}" if "seed" in given else "")

    def _new_folder(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder


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
