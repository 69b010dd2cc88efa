"""The tests of Spark with another PySpark than the locked one, and everything else as locked."""

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
_PATIENT = {"UV_SYSTEM_CERTS": "1", "UV_HTTP_TIMEOUT": "300", "UV_HTTP_RETRIES": "10", "UV_PYTHON_DOWNLOADS": "never"}


def run_versions(report: Report, folder: Path, versions: Sequence[str] = OTHERS) -> None:
    """Needs the package index, unless uv has the packages already."""
    for version in versions:
        python = str(_environment(folder, version))
        names = subprocess.run([python, "-c", "import pyspark; print(pyspark.__version__)"], capture_output=True, text=True, check=True)
        found = names.stdout.strip()
        report.say(f"PySpark {found}: its tests have begun")
        log = folder / f"pyspark-{version}.log"
        tests = sorted(str(path) for path in (_ROOT / "tests" / "spark").glob("test_spark_*.py"))
        command = [python, "-m", "pytest", *tests, "-m", "not slow", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("w") as out:
            code = subprocess.run(command, cwd=_ROOT, stdout=out, stderr=out, env=environment, check=False).returncode
        text = log.read_text(errors="replace")
        for line in re.findall(r"^(?:FAILED|ERROR) .*", text, re.MULTILINE):
            report.fail(f"PySpark {found}: {line}")
        passed = re.search(r"^.*\d+ passed.* in .*$", text, re.MULTILINE)
        if (code and not report.wrong) or not passed:
            report.fail(f"PySpark {found}: pytest ended with {code}: {text[-1_000:]}")
        report.figure(f"PySpark {found}: {passed[0].strip('= ') if passed else 'nothing passed'}")


def _environment(folder: Path, version: str) -> Path:
    """Its Python. What was installed stays for the next time."""
    place = _ROOT / ".tools" / f"pyspark-{version}"
    locked, override = folder / f"locked-{version}.txt", folder / f"override-{version}.txt"
    override.write_text(f"pyspark=={version}.*\n")
    _uv("export", "--locked", "--all-extras", "--no-emit-project", "--no-hashes", "--output-file", str(locked))
    if not (place / "bin" / "python").exists():
        _uv("venv", "--python", str(_ROOT / ".tools" / "bin" / "python"), str(place))
    python = place / "bin" / "python"
    _uv("pip", "install", "--python", str(python), "--requirements", str(locked), "--overrides", str(override), "--editable", str(_ROOT))
    return python


def _uv(*arguments: str) -> None:
    command = [str(_UV), "--quiet", *arguments]
    done = subprocess.run(command, cwd=_ROOT, env={**os.environ, **_PATIENT}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"uv {arguments[0]} failed: {done.stderr[-1_000:]}")
