"""The threat model names a test for each of its defences, for every kind of attack on every surface."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = "docs/explanation/threat-model.md"
STRIDE = set("STRIDE")


def surfaces(text: str) -> dict[str, list[list[str]]]:
    """The rows of each surface's table."""
    part = text[text.index("\n## Surfaces\n") : text.index("\n## Not prevented\n")]
    found = {}
    for section in part.split("\n### ")[1:]:
        name, _, body = section.partition("\n")
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body.splitlines() if line.startswith("|")]
        found[name] = rows[2:]
    return found


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / PAGE).read_text(encoding="utf-8")


def test_every_surface_has_every_kind_of_attack(page: str) -> None:
    found = surfaces(page)
    assert len(found) >= 10
    for surface, rows in found.items():
        kinds = [row[0] for row in rows]
        assert set(kinds) == STRIDE, (surface, STRIDE - set(kinds))
        assert kinds == sorted(kinds, key="STRIDE".index), surface
        assert all(len(row) == 4 and all(row) for row in rows), surface


def test_every_defence_names_tests_that_exist(page: str, repository: Path) -> None:
    sources = [*(repository / "tests").rglob("*.py"), *(repository / "src/sluiceway/testing").rglob("*.py")]
    existing = {
        name for path in sources for name in re.findall(r"^ *(?:async )?def (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    targets = {f"make {name}" for name in re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE)}
    missing = {}
    for surface, rows in surfaces(page).items():
        for row in rows:
            shown = row[3].split(", ")
            assert all(re.fullmatch(r"`[^`]+`", each) for each in shown), (surface, row[3])
            if unknown := [each for each in shown if each.strip("`") not in existing | targets]:
                missing[f"{surface}: {row[1]}"] = unknown
    assert missing == {}
