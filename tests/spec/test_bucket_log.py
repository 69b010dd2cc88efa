"""The specification of a partition's log in a bucket holds, and each of its rules is needed."""

from __future__ import annotations

import pytest

from spec.__main__ import check, main
from spec.bucket_log import ABLATIONS, Rules
from spec.checker import Broken, Checker


def test_no_acknowledged_cycle_is_lost_in_any_order_of_the_steps() -> None:
    result = check(Rules())
    assert result.broken is None, "\n".join(result.trace)
    # A model that does nothing would hold, too.
    assert result.states > 50_000


@pytest.mark.parametrize("rules", ABLATIONS.values(), ids=list(ABLATIONS))
def test_no_rule_can_be_left_out(rules: Rules) -> None:
    assert check(rules).broken is not None


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--owners", "1", "--numbers", "2"]) == 1
    out = capsys.readouterr().out
    # A single owner loses nothing, so with these bounds most rules are not needed.
    assert out.startswith("a partition's log in a bucket, {'owners': 1, 'numbers': 2, 'cycles': 1, 'walks': 2}: holds (")
    assert "the head may go back: holds" in out


def test_a_counterexample_is_a_shortest_one() -> None:
    def steps(state: int) -> list[tuple[str, object]]:
        def step(by: int) -> int:
            if state + by == 7:
                raise Broken("seven")
            return state + by

        return [(f"+{by}", lambda by=by: step(by)) for by in (1, 3) if state < 20]

    result = Checker[int](steps).check(0)  # type: ignore[arg-type]
    assert (result.broken, result.trace) == ("seven", ["+1", "+3", "+3"])
