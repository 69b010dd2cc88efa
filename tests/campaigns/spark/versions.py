"""The tests of Spark with another PySpark or Python than the locked one, and everything else as locked."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.campaigns.kit.report import Report

OTHERS = ("4.2",)
"""Beside the locked one, with which everything else here is run."""

_ROOT = Path(__file__).resolve().parents[3]
_UV = _ROOT / ".tools" / "bin" / "uv"
OWN_PYTHON = str(_ROOT / ".tools" / "bin" / "python")
_PATIENT = {"UV_SYSTEM_CERTS": "1", "UV_HTTP_TIMEOUT": "300", "UV_HTTP_RETRIES": "10", "UV_PYTHON_DOWNLOADS": "never"}


def run_versions(report: Report, folder: Path, versions: Sequence[str] = OTHERS, pythons: Sequence[str] = (OWN_PYTHON,)) -> None:
    """Run the tests with each PySpark under each Python, which is a program's name or path.

    Needs the package index, unless uv has the packages already.
    """
    for python in pythons:
        for version in versions:
            _run(report, folder / f"{_named(python)}-{version}", version, python)


def _run(report: Report, folder: Path, version: str, base: str) -> None:
    folder.mkdir()
    python = str(_environment(folder, version, base))
    told = "import platform, pyspark; print('PySpark', pyspark.__version__, 'on Python', platform.python_version())"
    name = subprocess.run([python, "-c", told], capture_output=True, text=True, check=True).stdout.strip()
    report.say(f"{name}: the tests have begun")
    log = folder / "pytest.log"
    tests = sorted(str(path) for path in (_ROOT / "tests" / "spark").glob("test_*.py"))
    command = [python, "-m", "pytest", *tests, "-m", "not slow", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as out:
        code = subprocess.run(command, cwd=_ROOT, stdout=out, stderr=out, env=environment, check=False).returncode
    text = log.read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) .*", text, re.MULTILINE)
    for line in failed:
        report.fail(f"{name}: {line}")
    passed = re.search(r"^.*\d+ passed.* in .*$", text, re.MULTILINE)
    if (code and not failed) or not passed:
        report.fail(f"{name}: pytest ended with {code}: {text[-1_000:]}")
    report.figure(f"{name}: {passed[0].strip('= ') if passed else 'nothing passed'}")


def _named(python: str) -> str:
    return "own" if python == OWN_PYTHON else Path(python).name


def _environment(folder: Path, version: str, base: str) -> Path:
    """Its Python. What was installed stays for the next time."""
    place = _ROOT / ".tools" / (f"pyspark-{version}" if base == OWN_PYTHON else f"pyspark-{version}-{_named(base)}")
    locked, override = folder / "locked.txt", folder / "override.txt"
    override.write_text(f"pyspark=={version}.*\n")
    _uv("export", "--locked", "--all-extras", "--no-emit-project", "--no-hashes", "--output-file", str(locked))
    if not (place / "bin" / "python").exists():
        _uv("venv", "--python", base, str(place))
    python = place / "bin" / "python"
    _uv("pip", "install", "--python", str(python), "--requirements", str(locked), "--overrides", str(override), "--editable", str(_ROOT))
    return python


def _uv(*arguments: str) -> None:
    command = [str(_UV), "--quiet", *arguments]
    done = subprocess.run(command, cwd=_ROOT, env={**os.environ, **_PATIENT}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"uv {arguments[0]} failed: {done.stderr[-1_000:]}")
