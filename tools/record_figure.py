"""Runs a campaign and records its figure in docs/explanation/figures.json: `python tools/record_figure.py kills -- make crash ROUNDS=250`.

The name is that of a campaign in docs/explanation/guarantees.toml. Recorded are the last line that the command prints, its seconds, the
date, the commit, the processors and the load of the machine as it began and ended. A command that fails is not recorded, nor one that runs
with changes that are not committed. `--size` and `--detail` say it in other words than the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
FIGURES: Final = "docs/explanation/figures.json"


class NotRecordedError(Exception):
    """There is no figure to record."""


def record(root: Path, campaign: str, command: Sequence[str], size: str = "", detail: str = "") -> dict[str, Any]:
    """Run the command in that checkout, and return the figure that was added. Raises NotRecordedError."""
    campaigns = tomllib.loads((root / "docs/explanation/guarantees.toml").read_text(encoding="utf-8"))["campaigns"]
    if campaign not in campaigns:
        raise NotRecordedError(f"there is no campaign {campaign} in guarantees.toml; there are {', '.join(campaigns)}")
    if changed := _git(root, "status", "--porcelain", "--untracked-files=no"):
        raise NotRecordedError(f"a figure is of a commit, and these files have changed since:\n{changed}")
    commit, began, load = _git(root, "rev-parse", "--short=8", "HEAD"), time.monotonic(), os.getloadavg()[0]
    last = _run(root, command)
    figure = {
        "campaign": campaign,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit,
        "command": " ".join(f"'{word}'" if " " in word else word for word in command),
        "size": size or last.replace("|", "\\|"),
        "detail": detail,
        "wrong": "0",
        "seconds": round(time.monotonic() - began),
        "load": f"{os.cpu_count()} cores, load {load:.1f} as it began, {os.getloadavg()[0]:.1f} as it ended",
    }
    path = root / FIGURES
    figures = [*json.loads(path.read_text(encoding="utf-8")), figure]
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return figure


def _run(root: Path, command: Sequence[str]) -> str:
    """The last line that the command prints, which goes through to the terminal. Raises NotRecordedError if it fails."""
    last = ""
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        raise NotRecordedError(f"the command ended with {process.returncode}: that is no figure, but something to look into")
    return last


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tools/record_figure.py", description=__doc__)
    parser.add_argument("campaign", help="its name in guarantees.toml")
    parser.add_argument("--size", default="", help="what was done, in a few words (the last line)")
    parser.add_argument("--detail", default="", help="what else is worth knowing")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    given = parser.parse_args()
    try:
        figure = record(ROOT, given.campaign, given.command, given.size, given.detail)
    except NotRecordedError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"recorded: {figure['size']}; now run python tools/docs_guarantees.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
