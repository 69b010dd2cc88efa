"""The specification of a partition in a bucket holds, and each of its rules is needed."""

from __future__ import annotations

import pytest

from spec.__main__ import check, main
from spec.bucket_journals import ABLATIONS, Rules
from spec.checker import Broken, Checker


def test_no_acknowledged_cycle_is_lost_in_any_order_of_the_steps() -> None:
    result = check(Rules())
    assert result.broken is None, "\n".join(result.trace)
    # A model that does nothing would hold, too.
    assert result.states > 40_000


@pytest.mark.parametrize("rules", ABLATIONS.values(), ids=list(ABLATIONS))
def test_no_rule_can_be_left_out(rules: Rules) -> None:
    assert check(rules).broken is not None


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--owners", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a partition in a bucket, {'owners': 1, 'numbers': 2, 'cycles': 1, 'heads': 3, 'walks': 1}: holds (")
    assert "ending entries are deleted: BROKEN: owner 0 acknowledges" in out
    assert "in the journal of 0 lands" in out


def test_a_counterexample_is_a_shortest_one() -> None:
    def steps(state: int) -> list[tuple[str, object]]:
        def step(by: int) -> int:
            if state + by == 7:
                raise Broken("seven")
            return state + by

        return [(f"+{by}", lambda by=by: step(by)) for by in (1, 3) if state < 20]

    result = Checker[int](steps).check(0)  # type: ignore[arg-type]
    assert (result.broken, result.trace) == ("seven", ["+1", "+3", "+3"])
