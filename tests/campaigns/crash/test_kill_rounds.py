"""Kill −9 of a real server under load, with a ledger kept outside; and control groups that the ledger must find guilty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.crash.loop_disk import LoopDisk, LoopDiskError
from tests.campaigns.crash.rounds import Rounds
from tests.campaigns.kit import sabotaged_server

pytestmark = pytest.mark.crash


def no_progress(_line: str) -> None:
    """The result is enough."""


@pytest.mark.slow
def test_a_killed_server_keeps_its_word(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, seed=5)
    tally = rounds.run(5, no_progress)
    assert tally.faults == 0, tally.examples
    for kind in ("produced", "completed", "retried", "killed", "died", "leases extended", "served again"):
        assert tally.counts[kind] > 0, f"nothing was {kind}: {tally.summary()}"


@pytest.mark.slow
def test_a_server_that_answers_before_it_writes_is_found_out(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, seed=6, command=sabotaged_server.command("answers-early"))
    tally = rounds.run(5, no_progress)
    assert tally.faults > 0, tally.summary()


@pytest.mark.slow
def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    try:
        with LoopDisk(tmp_path) as disk:
            rounds = Rounds(tmp_path, seed=7, disk=disk)
            tally = rounds.run(10, no_progress)
            assert tally.faults == 0, tally.examples
    except LoopDiskError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", ["off", "normal"])
def test_without_syncs_a_power_cut_does_lose_something(tmp_path: Path, synchronous: str) -> None:
    try:
        with LoopDisk(tmp_path) as disk:
            rounds = Rounds(tmp_path, seed=8, command=sabotaged_server.command(f"sync-{synchronous}"), disk=disk)
            tally = rounds.run(10, no_progress)
            assert tally.counts["lost"] > 0, tally.summary()
    except LoopDiskError as error:
        pytest.skip(str(error))
