"""The commands on upgrades."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sluiceway import __version__
from sluiceway.cli import upgrades
from sluiceway.client import InstanceList
from sluiceway.contract.instance_answers import Instance
from sluiceway.kernel.compatibility import NEWEST
from sluiceway.testing import TestServer, server
from tests.cli.cli_shell import Shell


@pytest.fixture(scope="module")
def served() -> Iterator[TestServer]:
    with server() as running:
        yield running


@pytest.fixture
def shell(served: TestServer, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    monkeypatch.setenv("SLUICEWAY_URL", served.url)
    return Shell("q", monkeypatch, capsysbinary)


def test_a_server_that_has_the_newest_level(shell: Shell) -> None:
    code, out, said = shell.ends("upgrade", "show")
    assert (code, [line.split() for line in out.splitlines()]) == (
        0,
        [["instance", "release", "levels"], ["instance", __version__, str(NEWEST)]],
    )
    assert said == f"compatibility level {NEWEST}; nothing to finalize\n"
    assert shell.says("upgrade", "finalize") == f"Compatibility level {NEWEST}\n"
    (shown,) = shell.json("upgrade", "finalize")
    assert (shown["level"], shown["reachable_level"]) == (NEWEST, NEWEST)


def remains(level: int, reachable: int, **levels: list[int] | None) -> str:
    items = [Instance(instance=name, levels=each) for name, each in levels.items()]
    return upgrades._remains(InstanceList(items=items, strategy="rounds", era=1, level=level, reachable_level=reachable))


def test_what_remains_to_be_done() -> None:
    assert remains(11, 11, a=[11, 12], b=[11, 11], c=None) == "compatibility level 11; 2 instances to upgrade before level 12: b, c"
    assert remains(11, 12, a=[11, 12]).endswith(
        "all instances understand 12: run `sluiceway upgrade finalize`, or go back to the release before"
    )
    assert remains(12, 12, a=[11, 12]) == "compatibility level 12; nothing to finalize"
