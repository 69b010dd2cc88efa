"""docs/explanation/guarantees.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_promise_names_tests_that_exist(repository: Path) -> None:
    text = (repository / "docs" / "explanation" / "guarantees.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    sources = [*(repository / "tests").rglob("test_*.py"), *(repository / "src" / "sluiceway" / "testing").glob("*.py")]
    existing = {name for path in sources for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    assert len(named) > 20
    assert named <= existing, sorted(named - existing)
