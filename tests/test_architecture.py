"""The floors, the purity of the core and the size of files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAX_LINES = 500


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
        ("attic/__init__.py", "", "attic"),
    ],
)
def test_a_planted_breach_is_found(repository: Path, tmp_path: Path, file: str, line: str, contract: str) -> None:
    shutil.copytree(repository / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "pyproject.toml", tmp_path)
    planted = tmp_path / "src" / "sluiceway" / file
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(line + "\n")
    result = check_imports(tmp_path)
    assert result.returncode != 0
    assert contract in " ".join((result.stdout + result.stderr).split())


def test_a_file_can_be_read_alone(repository: Path) -> None:
    files = [path for room in ("src", "tests", "conformance") for path in (repository / room).rglob("*.py")]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert lengths
    assert not {str(path.relative_to(repository)): lines for path, lines in lengths.items() if lines > MAX_LINES}
