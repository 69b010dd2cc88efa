"""The commands on schedules, against a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluiceway.testing import TestServer, server
from tests.cli.cli_shell import Shell


@pytest.fixture(scope="module")
def served() -> Iterator[TestServer]:
    with server() as running:
        running.client.create_queue("orders")
        yield running


@pytest.fixture
def shell(served: TestServer, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    monkeypatch.setenv("SLUICEWAY_URL", served.url)
    return Shell("orders", monkeypatch, capsysbinary)


CREATE = ("schedule", "create", "close", "--queue", "orders", "--cron", "30 18 * * mon-fri", "--timezone", "Europe/Berlin")


def test_a_schedule_from_its_creation_to_its_end(served: TestServer, shell: Shell, tmp_path: Path) -> None:
    said = shell.says(*CREATE, "--payload", "the day", "--kind", "job", "--header", "a=b", "--jitter", "1m", "--catch-up", "skip")
    assert said.startswith("Created close. Next: 20")
    assert said.endswith(" UTC\n")
    listed = shell.says("schedule", "list", "--queue", "orders")
    assert [line.split("  ")[0] for line in listed.splitlines()] == ["schedule", "close"]
    assert shell.says("schedule", "pause", "close") == "Paused close\n"
    (tmp_path / "payload").write_bytes(b"\xff")
    changed = shell.says(
        "schedule",
        "update",
        "close",
        "--cron",
        "@hourly",
        "--catch-up",
        "last",
        "--timezone",
        "UTC",
        "--payload-file",
        str(tmp_path / "payload"),
    )
    assert changed == "Updated close. It is paused.\n"
    assert shell.says("schedule", "resume", "close").startswith("Resumed close. Next: ")
    assert "Produced " in shell.says("schedule", "run", "close")
    served.clock.advance("1h")
    shown = shell.says("schedule", "show", "close")
    assert "payload (base64)  /w==" in shown
    assert "last fired" in shown
    found = json.loads(shell.says("schedule", "show", "close", "--json"))
    assert (found["catch_up"], found["last_fired"]["scheduled_at"][-6:]) == ("last", "00:00Z")
    assert json.loads(shell.says("schedule", "list", "--json"))["name"] == "close"
    assert shell.says("schedule", "delete", "close") == "Deleted close\n"
    code, out, error = shell.ends("schedule", "list")
    assert (code, out) == (0, "")
    assert "schedule create NAME" in error


def test_the_next_times_are_shown_in_both_zones(shell: Shell) -> None:
    after = ("--after", "2027-03-27T12:00:00Z")
    said = shell.says("schedule", "next", "--cron", "30 2 * * *", "--timezone", "Europe/Berlin", *after, "-n", "2")
    assert said == ("Europe/Berlin         UTC\nSun 2027-03-28 03:00  2027-03-28 01:00:00\nMon 2027-03-29 02:30  2027-03-29 00:30:00\n")
    one = shell.says("schedule", "next", "--cron", "30 2 * * *", *after, "-n", "1", "--json")
    assert json.loads(one) == {"at": "2027-03-28T02:30:00Z"}


@pytest.mark.parametrize(
    ("arguments", "code", "detail"),
    [
        (CREATE, 2, "an item needs a --payload or a --payload-file"),
        ((*CREATE, "--payload", "x", "--cron", "0 25 * * *"), 3, "cron: hour: 25 is not between 0 and 23"),
        ((*CREATE, "--payload", "x", "--timezone", "Europe/Berln"), 3, "did you mean Europe/Berlin?"),
        ((*CREATE, "--payload", "x", "--payload-file", __file__), 2, "exclude each other"),
        (("schedule", "update", "close", "--kind", "k"), 2, "an item is given as a whole: pass its --payload, too"),
        (("schedule", "update", "close"), 3, "nothing to change"),
        (("schedule", "show", "nobody"), 3, "there is no schedule 'nobody'"),
        (("schedule", "trigger", "close"), 2, "Use sluiceway schedule run."),
        (("cron",), 2, "Use sluiceway schedule create NAME"),
    ],
)
def test_what_is_wrong_is_said(shell: Shell, arguments: tuple[str, ...], code: int, detail: str) -> None:
    ended, _, error = shell.ends(*arguments)
    assert ended == code
    assert detail in error
