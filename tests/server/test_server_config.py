"""`serve --config`: what the file asks for is served, and a file that is wrong keeps the server from starting."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest

from sluiceway.cli.common import EXIT_REFUSED
from tests.server.server_process import COMMAND, PATIENCE

TWO = """
[backends.default]
kind = "sqlite"
[backends.second]
kind = "sqlite"
path = "elsewhere"
"""


def command(folder: Path, text: str) -> list[str]:
    config = folder / "sluiceway.toml"
    config.write_text(text)
    return [*COMMAND, "serve", "--data", str(folder / "data"), "--listen", "127.0.0.1:0", "--config", str(config)]


def test_a_queue_lies_on_all_backends(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path, TWO), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            answer = httpx.post(f"{url}/v1/queues.create", json={"queue_name": "q", "requested_partitions": 4}, timeout=PATIENCE)
            assert [each["backend"] for each in answer.json()["partitions"]] == ["default", "second"] * 2
            assert len([*(tmp_path / "elsewhere").glob("*.sqlite")]) == 2
        finally:
            server.terminate()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[backends.default]\nkind = 'sqlite'\npaht = 'x'", "backends.default: unknown key `paht`"),
        ("[backends.default]\nkind = 'postgres'\nurl = 'host=x secret:hunter2'", "backends.default.url"),
    ],
)
def test_a_configuration_that_is_wrong_keeps_the_server_from_starting(tmp_path: Path, text: str, named: str) -> None:
    ended = subprocess.run(command(tmp_path, text), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == EXIT_REFUSED
    assert named in ended.stderr
    assert "hunter2" not in ended.stderr
    assert "Traceback" not in ended.stderr
