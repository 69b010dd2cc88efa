"""What a change costs in messages (B1) and bytes (B2), by 200 members and 2,000 partitions."""

from __future__ import annotations

import pytest

from simulation.tasks_cost import MEMBERS, PARTITIONS, Document, Fleet
from sluiceway.core.group.task_member import Preset

NAME, TOKEN = 24, 24
"""Bytes of a member's name and of a partition's, with quotes and comma."""


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet()


def test_a_group_is_served_with_one_message_for_all_partitions(fleet: Fleet) -> None:
    owners = [each.owner for each in fleet.state.partitions.values()]
    assert len(owners) == PARTITIONS
    assert {owners.count(name) for name in fleet.members} == {PARTITIONS // MEMBERS}


@pytest.mark.parametrize(("preset", "messages"), [("log-leader", {"Finish": 1, "Assign": 1}), ("finisher-hint", {"Finish": 1})])
def test_a_partition_finishes(preset: Preset, messages: dict[str, int]) -> None:
    cost = Fleet(preset=preset).finish_one()
    assert cost.kinds == messages
    assert cost.bytes < 500


def test_a_member_is_lost_or_the_leader_dies(fleet: Fleet) -> None:
    for cost in (fleet.lose_one(), fleet.lose_leader()):
        assert cost.kinds == {"Term": 1, "Assign": 1}
        assert cost.steps == 2
        # A term names each member once; an assignment what the dead one had.
        assert cost.bytes < MEMBERS * NAME + (PARTITIONS // MEMBERS + 2) * (NAME + TOKEN) + 100


def test_a_member_comes(fleet: Fleet) -> None:
    cost = fleet.gain_one()
    moved = cost.kinds["Release"]
    assert moved <= PARTITIONS // MEMBERS + 1
    assert cost.kinds == {"Join": 1, "Term": 1, "Move": 1, "Release": moved}


def test_the_document_says_more_however_kindly_it_is_reckoned() -> None:
    document = Document()
    ours = Fleet()
    for cost, theirs in ((ours.finish_one(), document.finish_one), (ours.lose_one(), document.lose_one)):
        for each in (document.own, document.all):
            messages, size = theirs(each)
            assert cost.messages < messages
            assert 10 * cost.bytes < size
