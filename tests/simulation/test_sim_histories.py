"""Random histories in which stores fail, owners die and clients vanish: every promise is kept, and a seed is a history for good."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation.bank import BANK
from simulation.planting import planted
from simulation.queue_run import History, run_history
from simulation.runner import main
from simulation.world import EventLog
from tests.simulation.replays import replayed

SEEDS = 90
SOME = 30


@pytest.mark.parametrize("seed", [1081])
def test_seeds_that_failed_once_pass(seed: int) -> None:
    """1081: a lease was released in which a retry was staged, on a queue with a circuit breaker."""
    run_history(seed)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(SOME, SEEDS, SOME))])
def test_promises_are_kept_in_any_weather(first: int) -> None:
    tally: Counter[str] = Counter()
    for seed in range(first, first + SOME):
        history = run_history(seed)
        for queue in history.queues:
            tally.update(queue.ledger.tally)
            tally["replies"] += queue.replies
            for trail in queue.ledger.trails:
                tally.update(trail.tally)
    # A world in which nothing happens would prove nothing.
    for what in (
        "produced",
        "leased",
        "done",
        "retry",
        "dead",
        "release",
        "expired",
        "expired in the line",
        "given back",
        "cleared",
        "replies",
    ):
        assert tally[what] > SOME // 3, what
    for what in ("arrived", "redriven", "called back"):
        assert tally[what], what


@pytest.mark.parametrize("seed", [624, 1383])
def test_a_clear_of_what_is_scheduled_takes_what_a_back_off_has_just_put_off(seed: int) -> None:
    """These histories have one commit in which a lease runs out, its items are put off, and a clear of scheduled items takes them."""
    run_history(seed)


def test_a_world_in_which_nothing_goes_wrong_is_not_all_there_is() -> None:
    histories = [History(seed) for seed in range(SEEDS)]
    weathers = [history.world.weather for history in histories]
    for what in ("refused", "unknown", "hang", "open_fails", "transfer_fails", "cancels", "lost_replies"):
        assert any(getattr(weather, what) for weather in weathers), what
    for what in (
        *("kills", "stops", "power_cuts", "outages", "damages", "jumps", "mistakes"),
        *("hangs", "ghosts", "pauses", "updates", "redrives"),
    ):
        assert sum(getattr(weather, what) for weather in weathers) > SEEDS // 10, what
    assert sum(len(queue.sides) > 1 for history in histories for queue in history.queues) > SEEDS // 10
    for setting in ("max_attempts", "expire_timeout", "retry_backoff"):
        assert sum(bool(getattr(queue.record, setting)) for history in histories for queue in history.queues) > SEEDS // 10, setting


def test_a_seed_is_the_same_history_in_every_process() -> None:
    log = EventLog()
    run_history(7, log)
    assert log.digest() in replayed("--seed", "7")


def test_another_seed_is_another_history() -> None:
    first, second = EventLog(), EventLog()
    run_history(7, first)
    run_history(8, second)
    assert first.digest() != second.digest()


def test_the_command_counts_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--first", "5"]) == 0
    assert "3 of 3 seeds, 0 failed" in capsys.readouterr().out


def test_a_failing_seed_says_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    bug = next(bug for bug in BANK if bug.name == "replies_before_the_commit")
    with planted(bug):
        assert main(["--seeds", "2"]) == 1
        said = capsys.readouterr().out
        assert "python -m simulation --seed 0 --trace" in said
        assert main(["--seed", "0", "--trace"]) == 1
    trace = capsys.readouterr().out.splitlines()
    assert any("commit" in line for line in trace)
    assert "BrokenPromiseError" in trace[-1]


@pytest.mark.slow
def test_worker_processes_say_what_one_process_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The failing seeds in their order, how to replay them, and how many events each storey had."""
    said = {}
    for jobs in ("1", "2"):
        assert main(["--seeds", "5", "--jobs", jobs, "--plant", "replies_before_the_commit"]) == 1
        lines = capsys.readouterr().out.splitlines()
        failed = [line for line in lines if not line.startswith("queues: ")]
        said[jobs] = failed, lines[-1].partition(" events")[0]
    assert said["1"] == said["2"]
    assert "  replay it: python -m simulation --plant replies_before_the_commit --seed 0 --trace" in said["1"][0]
