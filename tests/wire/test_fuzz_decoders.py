"""Some thousands of damaged bodies for the decoders; `make fuzz` tries 400,000. And that the fuzzer finds what there is to find."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz import decoders, planted

SEED = 5


@pytest.mark.parametrize("kind", decoders.FORMATS)
def test_no_body_does_harm(kind: str) -> None:
    findings = decoders.attack(kind, SEED, 4_000)
    assert findings.faults == []
    assert findings.ends.total() == 4_000
    assert findings.ends["accepted"] > 50
    assert findings.ends["invalid_body"] > 50


@pytest.mark.slow
def test_planted_crashes_and_errors_are_found_and_can_be_repeated() -> None:
    count = 60
    findings = decoders.attack("planted", SEED, count, count, program="tests.fuzz.planted")
    draws = [Random(f"planted {SEED} {number}").randrange(10) for number in range(count)]
    crashes = [f"planted {SEED} {number}: SIGSEGV" for number, draw in enumerate(draws) if draw == 0]
    assert crashes
    assert [fault for fault in findings.faults if "SIGSEGV" in fault] == crashes
    errors = [f"planted {SEED} {number}" for number, draw in enumerate(draws) if draw == 1]
    assert sorted(findings.faults) == sorted(crashes + errors)
    assert findings.ends["SIGSEGV"] == len(crashes)
    with pytest.raises(KeyError, match="planted"):
        planted.attempt(Random(f"planted {SEED} {draws.index(1)}"))()
