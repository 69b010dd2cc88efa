"""The guides to the engines that `make test` does without: their blocks run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.engine_imports import engine
from tests.pages.page_blocks import fences
from tests.pages.page_check import check
from tests.server.server_process import ServerProcess


def run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICEWAY_SERVER__NEW_QUEUES")
    work = tmp_path / "work"
    work.mkdir()
    with ServerProcess(tmp_path / "data") as server:
        check([page], server.url, work, strict=False)


def test_the_page_of_ray(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine("ray")
    run(repository / "docs/guides/ray.md", tmp_path, monkeypatch)


@pytest.mark.parametrize(("name", "module"), [("Daft", "daft"), ("PyTorch", "torch")])
def test_a_block_that_needs_another_engine(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    engine(module)
    text = (repository / "docs/guides/engines.md").read_text(encoding="utf-8")
    comment = f"<!-- not run: needs {name}, which is not among the tests' requirements -->\n"
    (block,) = [each for each in fences(text) if each.reason is not None and f"needs {name}," in each.reason]
    assert text.count(comment) == 1
    page = tmp_path / "engines.md"
    page.write_text(text.replace(comment, ""), encoding="utf-8")
    assert f"import {module}\n" in block.code
    run(page, tmp_path, monkeypatch)
