"""`sluiceway demo` and `sluiceway bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from sluiceway.cli.common import Output, WholeNumber, print_json, printing

_SECONDS = click.FloatRange(0.1)
_SECONDS.name = "number"
"""click would refuse a text as "not a valid float range"."""


@click.command()
@click.option(
    "--input", "input_", metavar="PATH", help="Your own file or folder (CSV, JSON lines, Parquet, text) instead of the sample flights."
)
@click.option(
    "--kill",
    metavar="WHAT",
    help="Kill a component mid-run to see it recover: server-ingest, server-process, driver, or all.",
)
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Keep the data in this folder instead of a temporary one.")
def demo(input_: str | None, kill: str | None, data: Path | None) -> int:
    """Feed a Spark pipeline from a queue, and check that every item arrived once."""
    try:
        from sluiceway.demo.main import run_demo
    except ModuleNotFoundError as error:
        raise click.ClickException(f"the demo needs {error.name}; install it with: pip install 'sluiceway[demo]'") from error
    return int(run_demo(input_, kill, data))


@click.command()
@click.option("--rounds", type=WholeNumber(1), default=5, show_default=True, help="Measured rounds per system.")
@click.option("--seconds", type=_SECONDS, default=3.0, show_default=True, help="Duration of a round.")
@click.option("--output", "file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the figures to this file, as JSON.")
@printing
def bench(output: Output, rounds: int, seconds: float, file: Path | None) -> int:
    """Measure produce, lease and complete on this machine over HTTP, next to the same without HTTP and the raw disk rate.

    Starts its own servers in a temporary folder.
    """
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="sluiceway-bench-") as folder:
        figures = file or Path(folder) / "figures.json"
        what = ["--cases", "arrow-1000x100-c1", "arrow-1000x100-c8", "--systems", "sluiceway", "in-process", "disk"]
        size = ["--rounds", str(rounds), "--seconds", str(seconds)]
        command = [sys.executable, "-m", "sluiceway.bench", *what, *size, "--output", str(figures)]
        # Progress is text for people, so it must not mix with the JSON.
        ended = subprocess.run(command, stdout=sys.stderr if output.as_json else None, check=False)
        if ended.returncode == 0 and output.as_json:
            print_json(json.loads(figures.read_text()))
    return ended.returncode
