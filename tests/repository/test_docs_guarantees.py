"""Each promise names specifications, tests and campaigns that exist, and its evidence is current."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.registry import SPECS

PAGE, SOURCE, FIGURES = (f"docs/explanation/{name}" for name in ("guarantees.md", "guarantees.toml", "figures.json"))


@pytest.fixture(scope="module")
def tool(repository: Path) -> dict[str, Any]:
    return runpy.run_path(str(repository / "tools" / "docs_guarantees.py"))


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """What the tool reads, in a folder that may be changed."""
    shutil.copytree(repository / "docs" / "explanation", tmp_path / "docs" / "explanation")
    shutil.copytree(repository / "docs" / "project", tmp_path / "docs" / "project")
    shutil.copy(repository / "Makefile", tmp_path)
    for name in ("spec", "tests", "src", "conformance", "simulation"):
        (tmp_path / name).symlink_to(repository / name)
    return tmp_path


def test_the_evidence_of_each_promise_exists_and_is_current(repository: Path, tool: dict[str, Any]) -> None:
    guarantees = tool["Guarantees"](repository)
    assert list(guarantees.wrong()) == []
    pages = {name: (repository / name).read_text(encoding="utf-8") for name in guarantees.render()}
    assert pages == guarantees.render(), "run: python tools/docs_guarantees.py"
    assert sorted(guarantees.promises) == list(range(1, len(guarantees.promises) + 1)), "a promise keeps its number"


def test_each_test_that_the_page_names_exists(repository: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", (repository / PAGE).read_text(encoding="utf-8")))
    sources = [*(repository / "tests").rglob("test_*.py"), *(repository / "src" / "sluiceway" / "testing").glob("*.py")]
    existing = {name for path in sources for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))}
    assert len(named) > 5
    assert named <= existing, sorted(named - existing)


def test_each_spec_has_its_invariants(repository: Path, tool: dict[str, Any]) -> None:
    found = tool["Guarantees"](repository).invariants
    assert found.keys() == SPECS.keys()
    assert all(found.values())
    assert "promise 1: item … was acknowledged, and is not stored" in found["fences"]


@pytest.mark.parametrize(
    ("file", "before", "after", "wrong"),
    [
        (
            SOURCE,
            "::test_done_means_synced",
            "::test_done_means_done",
            "promise 1: no test tests/storage/test_sqlite_faults.py::test_done_means_done",
        ),
        (SOURCE, "test_sqlite_faults.py", "test_sqlite_mistakes.py", "no test tests/storage/test_sqlite_mistakes.py::"),
        (SOURCE, '"tasks: S3"', '"tasks: S99"', "promise 47: no invariant tasks: S99"),
        (SOURCE, 'specs = ["keys", "removal"]', 'specs = ["keys"]', "promise 41: the specification removal has an invariant of it"),
        (SOURCE, 'campaigns = ["two-backends"]', 'campaigns = ["three-backends"]', "promise 20: no campaign three-backends"),
        (SOURCE, '"C34"', '"C999"', "promise 58: no conformance case C999"),
        (SOURCE, '"make test-upgrade"', '"make test-downgrade"', "campaign upgrade: nothing runs as make test-downgrade"),
        (
            SOURCE,
            "number = 48\n",
            "number = 48\ntests_of_old = []\n[[promises]]\nnumber = 65\n",
            "promises of only one of the page and guarantees.toml: [65]",
        ),
        (PAGE, "<!-- evidence 36 -->", "", "the page needs a line"),
        (FIGURES, '"campaign": "hostile"', '"campaign": "friendly"', "figures.json: no campaign friendly"),
    ],
)
def test_evidence_that_does_not_exist_is_found(
    checkout: Path, tool: dict[str, Any], file: str, before: str, after: str, wrong: str
) -> None:
    path = checkout / file
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")
    assert any(wrong in each for each in tool["Guarantees"](checkout).wrong())


def test_a_promise_without_evidence_is_found(checkout: Path, tool: dict[str, Any]) -> None:
    path = checkout / SOURCE
    text = path.read_text(encoding="utf-8")
    bare = re.sub(r"number = 8\n.*?\n\n", 'number = 8\nfaults = ""\n\n', text, count=1, flags=re.DOTALL)
    path.write_text(bare, encoding="utf-8")
    assert "promise 8: no specification, no test, no campaign" in list(tool["Guarantees"](checkout).wrong())


def test_a_page_shows_the_last_figure(checkout: Path, tool: dict[str, Any]) -> None:
    path = checkout / FIGURES
    figures = json.loads(path.read_text(encoding="utf-8"))
    last = next(each for each in reversed(figures) if each["campaign"] == "hostile")
    path.write_text(json.dumps([*figures, {**last, "size": "41 attacks", "date": "2027-01-31"}]), encoding="utf-8")
    pages = tool["Guarantees"](checkout).render()
    assert all("41 attacks, wrong: 0 other clients unserved (2027-01-31" in text for text in pages.values())
    assert "40 attacks, wrong" not in "".join(pages.values())


@pytest.fixture
def recorder(repository: Path) -> Callable[..., dict[str, Any]]:
    record: Callable[..., dict[str, Any]] = runpy.run_path(str(repository / "tools" / "record_figure.py"))["record"]
    return record


def test_a_run_is_recorded_with_its_commit_and_the_machines_load(checkout: Path, recorder: Callable[..., dict[str, Any]]) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        return subprocess.run(["git", *identity, *words], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("add", "docs", "Makefile")
    git("commit", "-q", "-m", "all")
    figure = recorder(checkout, "hostile", [sys.executable, "-c", "print('a\\n7 attacks\\n')"], detail="on a whim")
    assert (figure["size"], figure["detail"], figure["wrong"]) == ("7 attacks", "on a whim", "0")
    assert git("rev-parse", "HEAD").startswith(figure["commit"])
    assert "cores, load" in figure["load"]
    assert json.loads((checkout / FIGURES).read_text(encoding="utf-8"))[-1] == figure
    for campaign, command, why in (
        ("hostile", ["true"], "have changed since"),
        ("friendly", ["true"], "no campaign friendly"),
    ):
        with pytest.raises(Exception, match=why):
            recorder(checkout, campaign, command)
    git("commit", "-q", "-a", "-m", "figure")
    with pytest.raises(Exception, match="ended with 1"):
        recorder(checkout, "hostile", [sys.executable, "-c", "raise SystemExit(1)"])
    assert git("status", "--porcelain", "--untracked-files=no") == ""
