"""Runs the blocks of a page of docs/ as a notebook does, in one Spark session: `python spark_pages.py URL PAGE…`, in an empty folder.

Blocks of python run in one namespace for each page, blocks of sh in a shell whose `sluiceway` is this one; a block of another language,
or indented, does not run. A page says that its server is on the port of `sluiceway dev`, and is told another. The last line of stdout
is the pages' outputs, block by block, as JSON.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from tests.pages.page_blocks import Block, blocks

USUAL = "http://127.0.0.1:2319"


def run(page: Path, url: str) -> list[str]:
    """What each block prints. An error names the block's line in the page."""
    names: dict[str, object] = {"__name__": "__main__"}
    run_as: dict[str, Callable[[Block], str]] = {
        "python": lambda block: _python(block, page, url, names),
        "sh": lambda block: _shell(block, url),
    }
    printed = []
    for block in blocks(page.read_text(encoding="utf-8")):
        try:
            printed.append(run_as[block.language](block).replace(url, USUAL))
        except BaseException:
            print(f"{page}: the block in line {block.line}", file=sys.stderr)
            raise
    return printed


def _python(block: Block, page: Path, url: str, names: dict[str, object]) -> str:
    out = io.StringIO()
    # An exception's line is that of the page.
    code = compile("\n" * (block.line - 1) + block.code.replace(USUAL, url), page, "exec")
    with redirect_stdout(out):
        exec(code, names)
    return out.getvalue()


def _shell(block: Block, url: str) -> str:
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "SLUICEWAY_URL": url}
    done = subprocess.run(["sh", "-e", "-c", block.code], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    print(json.dumps([run(Path(page), sys.argv[1]) for page in sys.argv[2:]]))
