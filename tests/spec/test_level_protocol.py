"""The specification of the compatibility level holds, and each of its rules is needed."""

from __future__ import annotations

import pytest

from spec.__main__ import check_levels
from spec.compatibility_levels import ABLATIONS, Rules


def test_no_member_is_there_that_does_not_understand_the_level() -> None:
    result = check_levels(Rules())
    assert result.broken is None, "\n".join(result.trace)
    # A model that does nothing would hold, too.
    assert result.states > 5_000


@pytest.mark.parametrize("rules", ABLATIONS.values(), ids=list(ABLATIONS))
def test_no_rule_can_be_left_out(rules: Rules) -> None:
    assert check_levels(rules).broken is not None
