"""The decoders of `make fuzz-coverage` take their seeds, and some damaged ones. And that the fuzzer finds what there is to find."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import guided, planted
from tests.fuzz.arrow_bodies import damaged
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_no_seed_does_harm(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    assert len(seeds) >= 3
    assert all(len(each) <= target.longest for each in seeds), "the fuzzer would cut it"
    for seed in (b"", *seeds):
        target.put(seed)
    chance = Random(7)
    for _ in range(200):
        target.put(damaged(chance, seeds)[: target.longest])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("atheris") is None, reason="only make fuzz-coverage installs it")
def test_a_planted_fault_is_found_and_can_be_repeated(tmp_path: Path) -> None:
    """Behind four comparisons, which chance alone passes once in four billion times."""
    run = guided.fuzz("planted", 120, tmp_path, seed=1, module="tests.fuzz.planted")
    (fault,) = run.faults
    assert run.edges[1] > run.edges[0]
    with pytest.raises(ZeroDivisionError):
        planted.TARGETS["planted"].put(fault.read_bytes())
