"""What a shell is offered: commands, options, and the server's queues."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from sluiceway.cli import session
from sluiceway.cli.common import PROGRAM
from sluiceway.cli.main import cli
from sluiceway.client import Client
from sluiceway.kernel.errors import SluicewayError
from tests.cli.cli_shell import Shell
from tests.server.fake_service import FakeService, serving
from tests.server.server_process import COMMAND, PATIENCE, closed_port


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "COMPLETION_PATIENCE", PATIENCE)


def offered(*words: str) -> list[str]:
    """What is offered for the last word."""
    complete = ShellComplete(cli, {}, PROGRAM, "_SLUICEWAY_COMPLETE")
    return [item.value for item in complete.get_completions(list(words[:-1]), words[-1])]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FakeService()) as url:
        yield url


def test_commands_and_options() -> None:
    assert {"queue", "produce", "top"} <= set(offered(""))
    assert offered("queue", "cl") == ["clear"]
    assert offered("lease", "q", "--lease") == ["--lease-timeout"]


@pytest.mark.parametrize("command", ["lease", "queue info", "partition list", "partition explain", "redrive", "audit list --queue"])
def test_names_of_queues(url: str, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("SLUICEWAY_URL", url)
    assert offered(*command.split(), "") == ["q"]
    assert offered(*command.split(), "x") == []


def test_the_server_that_was_typed_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_port() as port:
        monkeypatch.setenv("SLUICEWAY_URL", f"http://127.0.0.1:{port}")
        assert offered("lease", "") == []
        assert offered("lease", "--url", url, "") == ["q"]


def test_the_shell_gets_them(url: str) -> None:
    """As the script asks. Whether the queue is among them depends on how fast the machine is."""
    asking = {"_SLUICEWAY_COMPLETE": "bash_complete", "COMP_WORDS": "sluiceway lease ", "COMP_CWORD": "2", "SLUICEWAY_URL": url}
    done = subprocess.run(COMMAND, env=os.environ | asking, capture_output=True, text=True, check=False)
    assert done.stdout.strip() in ("plain,q", "")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLUICEWAY_URL", "nonsense"), ("SLUICEWAY_CONTEXT", "unknown"), ("SLUICEWAY_CA_FILE", "/not/there")],
)
def test_what_is_wrong_is_passed_over_in_silence(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if name == "SLUICEWAY_CA_FILE":
        monkeypatch.setenv("SLUICEWAY_URL", "https://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    assert offered("lease", "") == []
    assert capfd.readouterr() == ("", "")


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer in the end; whoever pressed Tab has gone on."""
    answer, ended = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> None:
        answer.wait()
        ended.set()
        raise SluicewayError("unavailable", "too late")

    monkeypatch.setattr(Client, "list_queues", slow)
    monkeypatch.setattr(session, "COMPLETION_PATIENCE", 0.01)
    assert offered("lease", "") == []
    answer.set()
    assert ended.wait(PATIENCE)


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_can_read(
    name: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text(Shell("", monkeypatch, capsysbinary).says("completion", name))
    assert "_SLUICEWAY_COMPLETE" in script.read_text()
    if program := shutil.which(name):
        done = subprocess.run([program, "-n", str(script)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_shell_is_2(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    code, _, err = Shell("", monkeypatch, capsysbinary).ends("completion", "tcsh")
    assert code == 2
    assert "'bash', 'zsh', 'fish'" in err
