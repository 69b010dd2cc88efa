"""Runs pages of docs/ and compares what they print with what they show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.pages.page_blocks import Block, blocks, masked

PATIENCE = 600.0
"""Seconds for the blocks of some pages. Only what hangs takes so long."""


def check(pages: Sequence[Path], url: str, work: Path, strict: bool = True) -> None:
    """Run the pages, in one process and in that empty folder, against the server.

    `strict`: Python prints nothing but what the page shows. With SLUICEWAY_TEST_WRITE_PAGES=1 what was printed is put into the pages.
    """
    command = [sys.executable, "-m", "tests.pages.run_page", url, *map(str, pages)]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    for page, printed in zip(pages, json.loads(done.stdout.splitlines()[-1]), strict=True):
        text = page.read_text(encoding="utf-8")
        found = list(zip(blocks(text), printed, strict=True))
        assert found, f"{page.name} has no block that runs"
        if os.environ.get("SLUICEWAY_TEST_WRITE_PAGES"):
            write(page, text, found, strict)
            continue
        for block, output in found:
            if block.shown is None:
                assert not (strict and block.language == "python" and output), (
                    f"{page.name}, line {block.line}, prints what is not shown: {output}"
                )
            else:
                assert masked(output) == masked(block.shown), f"{page.name}, line {block.line}"


def write(page: Path, text: str, found: list[tuple[Block, str]], strict: bool) -> None:
    """Put what was printed into the page, where the page shows it or Python printed something."""
    for block, output in reversed(found):
        if block.shown is not None:
            shown = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
            text = text[: block.start] + shown + "\n" + text[block.end :]
        elif strict and block.language == "python" and output:
            text = text[: block.start] + f"\n\n```text\n{output.strip()}\n```" + text[block.end :]
    page.write_text(text, encoding="utf-8")
