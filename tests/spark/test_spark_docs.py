"""The pages that teach Spark with Sluiceway: all of their code runs, in order, and prints what they show.

With SLUICEWAY_TEST_WRITE_PAGES=1 what was printed is put into the pages instead.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.page_blocks import Block, blocks
from tests.spark import spark_pages
from tests.spark.spark_world import server

# Both in one session: the first starts it, the last stops it.
PAGES = ("guides/from-kafka.md", "tutorials/spark.md")

_VARYING = (
    (r"\b[0-9a-z]{8}\.\d+\.\d+\b", "ID"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "TIME"),
    (r"Spark \d+\.\d+\.\d+ in [\d.]+ s", "Spark VERSION in N s"),
    (r"Java \d+ from .*?, Python", "Java N from SOMEWHERE, Python"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
    # Tables are as wide as what is in them.
    (r"[ \-]+", " "),
    (r" *\| *", "|"),
)


def masked(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, instead in _VARYING:
        text = re.sub(pattern, instead, text)
    return text.strip()


@pytest.mark.spark
@pytest.mark.slow
def test_the_pages_run_and_print_what_they_show(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a user's server is, not as those of other tests are.
    monkeypatch.delenv("SLUICEWAY_SERVER__NEW_QUEUES")
    pages = [repository / "docs" / name for name in PAGES]
    work = tmp_path / "work"
    work.mkdir()
    with server(tmp_path) as running:
        command = [sys.executable, spark_pages.__file__, running.url, *map(str, pages)]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page, printed in zip(pages, json.loads(done.stdout.splitlines()[-1]), strict=True):
        text = page.read_text(encoding="utf-8")
        found = list(zip(blocks(text), printed, strict=True))
        assert len(found) >= 5
        if os.environ.get("SLUICEWAY_TEST_WRITE_PAGES"):
            write(page, text, found)
            continue
        for block, output in found:
            if block.shown is None:
                assert not (block.language == "python" and output), f"{page.name}, line {block.line}, prints what is not shown: {output}"
            else:
                assert masked(output) == masked(block.shown), f"{page.name}, line {block.line}"


def write(page: Path, text: str, found: list[tuple[Block, str]]) -> None:
    """Put what was printed into the page, where the page shows it or Python printed something."""
    for block, output in reversed(found):
        if block.shown is not None:
            text = text[: block.start] + output.strip("\n") + "\n" + text[block.end :]
        elif block.language == "python" and output:
            text = text[: block.start] + f"\n\n```text\n{output.strip()}\n```" + text[block.end :]
    page.write_text(text, encoding="utf-8")


def test_a_block_of_text_is_the_output_of_the_block_right_before_it() -> None:
    page = "# T\n```python\nprint(1)\n```\n\n```text\n1\n```\nwords\n```sh\nls\n```\nwords\n```text\nno output\n```\n```toml\na = 1\n```\n"
    found = blocks(page)
    assert [(block.language, block.code, block.line, block.shown) for block in found] == [
        ("python", "print(1)\n", 3, "1\n"),
        ("sh", "ls\n", 11, None),
    ]


def test_what_differs_from_run_to_run_is_not_compared() -> None:
    assert masked("|2vzq7bhc.0.17 |2026-01-31 10:00:00.123|") == masked("|kx3q7bhd.3.7|2027-02-01 11:00:01|")
    assert masked("ready 3") != masked("ready 4")
