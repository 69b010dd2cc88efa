"""Each specification holds, and each of its rules is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spec.__main__ import main
from spec.checker import Broken, Checker
from spec.registry import SPECS, Task, run

LEAST = {
    "fences": 80_000,
    "rounds": 100_000,
    "claims": 100_000,
    "keys": 25_000,
    "removal": 30_000,
    "tasks": 200_000,
    "bucket": 40_000,
    "level": 5_000,
}
"""States that are to be visited: a model that does nothing would hold, too."""
ABLATIONS = [pytest.param(name, ablation, id=f"{name}: {ablation}") for name, spec in SPECS.items() for ablation in spec.ablations]


@pytest.mark.parametrize("name", SPECS)
def test_no_promise_is_broken_in_any_order_of_the_steps(name: str) -> None:
    result = run(Task(name))
    assert result.broken is None, "\n".join(result.trace)
    assert result.states > LEAST[name]


@pytest.mark.parametrize(
    ("name", "bounds"),
    [("rounds", {"placements": 1, "late_looks": 0, "beats": 2}), ("claims", {"late_looks": 1, "strays": 0})],
)
def test_no_promise_is_broken_with_the_steps_that_the_bounds_leave_out(name: str, bounds: dict[str, int]) -> None:
    result = run(Task(name, bounds=tuple(bounds.items())))
    assert result.broken is None, "\n".join(result.trace)
    assert result.states > 20_000


@pytest.mark.parametrize(("name", "ablation"), ABLATIONS)
def test_no_rule_can_be_left_out(name: str, ablation: str) -> None:
    assert run(Task(name, ablation)).broken is not None


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bucket", "--bound", "owners=1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a partition in a bucket (owners 1, numbers 2, cycles 1, heads 3, walks 1): holds (")
    assert "ending entries are deleted: BROKEN: owner 0 acknowledges" in out
    assert "in the journal of 0 lands" in out


def test_the_command_checks_in_several_processes() -> None:
    command = [sys.executable, "-m", "spec", "level", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.count("BROKEN") == len(SPECS["level"].ablations)


def test_the_command_refuses_what_there_is_not() -> None:
    for arguments in (["queues"], ["--bound", "owners=1"], ["fences", "--bound", "walks=1"]):
        with pytest.raises(SystemExit):
            main(arguments)


def test_a_counterexample_is_a_shortest_one() -> None:
    def steps(state: int) -> list[tuple[str, object]]:
        def step(by: int) -> int:
            if state + by == 7:
                raise Broken("seven")
            return state + by

        return [(f"+{by}", lambda by=by: step(by)) for by in (1, 3) if state < 20]

    result = Checker[int](steps).check(0)  # type: ignore[arg-type]
    assert (result.broken, result.trace) == ("seven", ["+1", "+3", "+3"])
