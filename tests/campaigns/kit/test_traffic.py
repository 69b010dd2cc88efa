"""Where clients go whose instance is away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.campaigns.kit.fleet import Fleet, Instance
from tests.campaigns.kit.serving import Awake
from tests.campaigns.kit.traffic import AWAY, Door


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Three instances that were never started."""
    instances = [Instance(tmp_path, f"i{n}", lambda _: "") for n in range(3)]
    for number, instance in enumerate(instances):
        instance.url = f"http://{number}"
    return Fleet(instances)


def test_a_client_whose_call_was_not_done_goes_elsewhere_and_comes_home_later(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tests.campaigns.kit.traffic.time", SimpleNamespace(monotonic=lambda: now))
    door = Door(fleet, 2)
    assert door.get() == "http://2"
    door.failed("http://2")
    assert door.get() == "http://0"
    # Another thread was told of the same failure.
    door.failed("http://2")
    assert door.get() == "http://0"
    door.failed("http://0")
    assert door.get() == "http://1"
    now += AWAY + 1
    assert door.get() == "http://2"


def test_only_who_is_frozen_need_not_answer(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.instances[1], "is_frozen", True)
    door = Door(fleet, 1)
    assert [door.may_hang(f"http://{n}") for n in range(3)] == [False, True, False]
    assert door.get() == "http://1"
    assert Awake(fleet, 1).get() == "http://2"
