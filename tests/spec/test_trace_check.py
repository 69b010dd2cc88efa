"""The specification of a partition accepts what the product does, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from simulation.planting import planted
from simulation.queue_run import History
from simulation.runner import BUGS
from spec.cluster_histories import cluster_histories
from spec.histories import check, main
from spec.partition_fences import ABSENT, READY, SETTLED, Change
from spec.simulated_histories import histories, recording
from spec.trace_check import Event, GaveUp, Heard, Opened, Opening, RanOut, Sent, Told, TraceCheck
from tests.spec.history_mutations import MUTATIONS, some
from tests.spec.real_histories import play

SEEDS = range(8)


@pytest.fixture(scope="module")
def simulated() -> list[list[Event]]:
    return [history for seed in SEEDS for history in histories(seed).values()]


def test_histories_of_the_simulator_are_accepted(simulated: Sequence[list[Event]]) -> None:
    rejected = [verdict for history in simulated if (verdict := TraceCheck().check(history)) is not None]
    assert not rejected, str(rejected[0])
    # Histories in which nothing happens would be accepted, too.
    kinds = {type(event) for history in simulated for event in history}
    assert kinds == {Opening, Opened, Sent, Heard, Told, GaveUp, RanOut}
    outcomes = {event.outcome for history in simulated for event in history if isinstance(event, Heard)}
    assert outcomes == {"done", "refused", "unknown"}


def test_histories_of_simulated_clusters_are_accepted() -> None:
    recorded = [history for seed in range(2) for history in cluster_histories(seed).values()]
    rejected = [verdict for history in recorded if (verdict := TraceCheck().check(history)) is not None]
    assert not rejected, str(rejected[0])
    assert {type(event) for history in recorded for event in history} == {Opening, Opened, Sent, Heard, Told, GaveUp, RanOut}


@pytest.mark.parametrize("name", MUTATIONS)
def test_histories_that_cannot_have_been_are_rejected(name: str, simulated: Sequence[list[Event]]) -> None:
    random = Random(name)
    mutated = [changed for history in simulated for changed in some(MUTATIONS[name], history, 2, random)]
    assert len(mutated) >= 10
    accepted = [changed for changed in mutated if TraceCheck().check(changed) is None]
    assert not accepted, f"{len(accepted)} of {len(mutated)}"


@pytest.mark.parametrize("name", ["replies_before_the_commit", "takes_unknown_for_done", "keeps_its_state_after_a_refusal"])
def test_histories_of_owners_with_a_planted_bug_are_rejected(name: str) -> None:
    for seed in range(20):
        with planted(BUGS["queues", name]), recording() as queues, contextlib.suppress(Exception):
            # The simulator finds it, too, but perhaps later.
            History(seed).live()
        recorded = [recorder.events for queue in queues.values() for recorder in queue.partitions.values()]
        if any(TraceCheck().check(history) is not None for history in recorded):
            return
    pytest.fail(f"no history with {name} is rejected")


def test_a_lease_may_not_be_told_of_twice() -> None:
    history: list[Event] = [
        Opening(0, (1, 1)),
        Opened(0, (1, 1), 0, frozenset()),
        Sent(0, (1, 1), 1, (Change(7, ABSENT, READY), Change(7, READY, 1))),
        Heard(0, (1, 1), "done"),
        Told(0, (7,), 1),
    ]
    assert TraceCheck().check(history) is None
    taken = [*history, Sent(0, (1, 1), 2, (Change(7, 1, READY), Change(7, READY, 2)))]
    assert TraceCheck().check(taken) is not None
    assert TraceCheck().check([*history, RanOut(1), *taken[-1:]]) is None
    settled = [*history, GaveUp((7,), 1), Sent(0, (1, 1), 2, (Change(7, 1, SETTLED),))]
    assert TraceCheck().check(settled) is None
    assert TraceCheck().check([*settled, Told(0, (7,), SETTLED)]) is not None
    assert TraceCheck().check([*settled, Heard(0, (1, 1), "done"), Told(0, (7,), SETTLED)]) is None


def test_what_is_not_seen_may_have_happened() -> None:
    history: list[Event] = [
        Opening(0, (1, 1)),
        Opened(0, (1, 1), 0, frozenset()),
        Sent(0, (1, 1), 1, (Change(7, ABSENT, READY),)),
        Heard(0, (1, 1), "unknown"),
        Opening(1, (2, 1)),
    ]
    landed, lost = Opened(1, (2, 1), 1, frozenset({(7, READY)})), Opened(1, (2, 1), 0, frozenset())
    assert TraceCheck().check([*history, landed]) is None
    assert TraceCheck().check([*history, lost]) is None
    # After that it cannot land any more.
    assert TraceCheck().check([*history, lost, Opening(0, (3, 1)), Opened(0, (3, 1), 1, landed.alive)]) is not None


def test_an_owner_does_not_listen_to_a_commit_of_before_it_opened_again() -> None:
    history: list[Event] = [
        Opening(0, (1, 1)),
        Opened(0, (1, 1), 0, frozenset()),
        Sent(0, (1, 1), 1, (Change(7, ABSENT, READY),)),
        Opening(0, (1, 2)),
        Opened(0, (1, 2), 0, frozenset()),
    ]
    assert TraceCheck().check([*history, Heard(0, (1, 1), "unknown"), Sent(0, (1, 2), 1, ())]) is None
    assert TraceCheck().check([*history, Heard(0, (1, 2), "unknown")]) is not None


def test_histories_of_real_servers_are_accepted(tmp_path: Path) -> None:
    played = play(tmp_path, seed=1, lost=0.1, lives=3, partitions=8)
    rejected = {name: verdict for name, history in played.items() if (verdict := TraceCheck().check(history)) is not None}
    assert not rejected, str(next(iter(rejected.values())))
    events = [event for history in played.values() for event in history]
    assert {type(event) for event in events} == {Opening, Opened, Sent, Heard, Told, GaveUp, RanOut}
    assert {event.outcome for event in events if isinstance(event, Heard)} >= {"done", "unknown"}


def test_histories_of_a_server_that_answers_before_it_writes_are_rejected(tmp_path: Path) -> None:
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        played = play(folder, seed, lost=0, lives=3, partitions=8, flaw="answers-early")
        if any(TraceCheck().check(history) is not None for history in played.values()):
            return
    pytest.fail("all are accepted")


def test_the_command_counts_what_it_has_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1", "--first", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"queues: 1 histories of {check('queues', 3).histories} partitions")
