"""Tutorials and guides are true: their blocks of code run, in order, against a real server, and print what the pages show."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.pages.page_blocks import blocks, fences, masked, without_code
from tests.pages.page_check import check
from tests.server.server_process import ServerProcess

RUN = (
    "../README.md",
    "../client/README.md",
    "tutorials/first-queue.md",
    "guides/client.md",
    "guides/engines.md",
    "guides/recipes.md",
    "guides/schedules.md",
    "guides/keys.md",
    "guides/bundles.md",
    "guides/unique-items.md",
    "guides/workers.md",
    "guides/cluster.md",
    "guides/rebalance.md",
    "guides/operations.md",
)
AT_ONCE = (
    "../README.md",
    "../client/README.md",
    "tutorials/first-queue.md",
    "guides/client.md",
    "guides/engines.md",
    "guides/recipes.md",
    "guides/schedules.md",
    "guides/keys.md",
    "guides/bundles.md",
    "guides/unique-items.md",
)
"""Those that `make test` runs; the others wait for `make test-slow`."""
SPARK = ("guides/from-kafka.md", "tutorials/spark.md")
"""Run by tests/spark/test_spark_docs.py, in one Spark session: the first starts it, the last stops it."""
ELSEWHERE = {
    "guides/ray.md": "tests/engines/test_engine_pages.py",
    "guides/groups.md": "tests/group/test_group_member.py",
    "guides/testing.md": "tests/client/test_client_testing.py",
}
"""Pages whose program a test of its own runs."""
NOT_YET = {
    "guides/jobs.md": "each block is a Spark job of its own; tests/spark/test_spark_jobs.py has the same commands",
}
"""Pages whose blocks do not run, with the reason. A page whose blocks all say so themselves is not here."""

LANGUAGES = {"python", "sh", "toml", "json", "sql", "text", "yaml", "console", "html", "ini", "dockerfile"}


def pages(repository: Path) -> dict[str, str]:
    """The READMEs, the tutorials and the guides by their path from docs/."""
    docs = repository / "docs"
    found = [
        repository / "README.md",
        repository / "client/README.md",
        docs / "index.md",
        *docs.glob("tutorials/*.md"),
        *docs.glob("guides/*.md"),
    ]
    return {os.path.relpath(path, docs): path.read_text(encoding="utf-8") for path in found}


@pytest.mark.parametrize("name", [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.slow) for name in RUN])
def test_the_page_runs_and_prints_what_it_shows(name: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a user's server is, not as those of other tests are.
    monkeypatch.delenv("SLUICEWAY_SERVER__NEW_QUEUES")
    work = tmp_path / "work"
    work.mkdir()
    with ServerProcess(tmp_path / "data") as server:
        check([repository / "docs" / name], server.url, work, strict=name.startswith("tutorials/"))


def test_every_page_with_code_is_run(repository: Path) -> None:
    with_code = {name for name, text in pages(repository).items() if blocks(text)}
    listed = [*RUN, *SPARK, *ELSEWHERE, *NOT_YET]
    assert sorted(listed) == sorted(with_code)
    for test in ELSEWHERE.values():
        assert (repository / test).is_file()


def test_every_block_names_its_language(repository: Path) -> None:
    """Else it would neither run nor be coloured."""
    for name, text in pages(repository).items():
        assert {block.language for block in fences(text)} <= LANGUAGES, name
        assert not re.search(r"\n\n    \S", without_code(text)), f"{name} has an indented block"


def test_a_block_that_does_not_run_says_why(repository: Path) -> None:
    reasons = [block.reason for text in pages(repository).values() for block in fences(text)]
    assert not [reason for reason in reasons if reason is not None and len(reason) < 8]


# ---- how blocks are found -------------------------------------------------------------------------------------


def test_a_block_of_text_is_the_output_of_the_block_right_before_it() -> None:
    page = "# T\n```python\nprint(1)\n```\n\n```text\n1\n```\nwords\n```sh\nls\n```\nwords\n```text\nno output\n```\n```json\n1\n```\n"
    assert [(block.language, block.code, block.line, block.shown) for block in blocks(page)] == [
        ("python", "print(1)\n", 3, "1\n"),
        ("sh", "ls\n", 11, None),
    ]


def test_a_comment_says_how_a_block_runs() -> None:
    page = "<!-- not run: a reason -->\n```sh\na\n```\n<!-- run: in the background -->\n\n```sh\nb\n```\n```sh\nc\n```\n"
    assert [(block.code, block.mode, block.reason) for block in fences(page)] == [
        ("a\n", "once", "a reason"),
        ("b\n", "in the background", None),
        ("c\n", "once", None),
    ]
    with pytest.raises(ValueError, match="line 3"):
        fences("<!-- run: some day -->\n```sh\na\n```\n")


def test_what_differs_from_run_to_run_is_not_compared() -> None:
    assert masked("|2vzq7bhc.0.17 |2026-01-31 10:00:00.123|") == masked("|kx3q7bhd.3.7|2027-02-01 11:00:01|")
    assert masked("ready 3") != masked("ready 4")
