"""The floors and the purity of the core."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest


def check_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_imports_go_down_only(repository: Path) -> None:
    result = check_imports(repository)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("kernel/planted.py", "from sluiceway.model import queue", "sluiceway.kernel is not allowed to import sluiceway.model"),
        ("core/planted.py", "import sluiceway.ports", "sluiceway.core is not allowed to import sluiceway.ports"),
        ("core/planted.py", "import time", "sluiceway.core is not allowed to import time"),
        ("cli/planted.py", "import simulation", "sluiceway.cli.planted -> simulation"),
        ("attic/__init__.py", "", "attic"),
    ],
)
def test_a_planted_breach_is_found(repository: Path, tmp_path: Path, file: str, line: str, contract: str) -> None:
    for root in ("src", "simulation", "bench"):
        shutil.copytree(repository / root, tmp_path / root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "pyproject.toml", tmp_path)
    planted = tmp_path / "src" / "sluiceway" / file
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(line + "\n")
    result = check_imports(tmp_path)
    assert result.returncode != 0
    assert contract in " ".join((result.stdout + result.stderr).split())


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = grimp.build_graph("sluiceway", "simulation", "bench")
    # Raises a CycleError, which names them.
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()


def test_no_file_name_says_three_things(repository: Path) -> None:
    """A name that stands for three things in the tree stands for none: no search finds what was meant."""
    roots = (repository / root for root in ("src", "simulation", "bench"))
    names = Counter(file.name for root in roots for file in root.rglob("*.py") if file.name not in ("__init__.py", "__main__.py"))
    assert not {name: times for name, times in names.items() if times > 2}


def test_no_file_name_occurs_more_than_twice(repository: Path) -> None:
    """A name is to say which file is meant."""
    folders = ("src", "simulation", "bench", "tests", "conformance", "tools")
    names = Counter(path.name for folder in folders for path in (repository / folder).rglob("*.py"))
    anywhere = {"__init__.py", "__main__.py", "conftest.py"}
    assert [name for name, times in names.items() if times > 2 and name not in anywhere] == []
