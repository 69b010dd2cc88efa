"""docs/guides/rebalance.md says what the code does: the states, the steps, and commands that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import click
import msgspec
import pytest

from sluiceway.contract.rebalances import PartitionState, StepKind
from sluiceway.core.partition.partition_states import ShownState, allows
from sluiceway.model.queue import PartitionRecord
from tests.cli.cli_shell import leaf_of, leaves
from tests.server.fake_service import RECORD


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "guides" / "rebalance.md").read_text(encoding="utf-8")


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the table whose heading begins so."""
    lines = page[page.index(f"\n| {heading} |") + 1 :].splitlines()
    rows = lines[: next(n for n, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_each_state_allows_what_the_table_says(page: str) -> None:
    rows = {state: (produce == "yes", lease == "yes", settle == "yes") for state, produce, lease, settle, _ in table(page, "state")}
    assert tuple(rows) == get_args(ShownState)
    for state in get_args(PartitionState):
        each = PartitionRecord(0, state=state)
        may = allows(msgspec.structs.replace(RECORD, partitions=(each,)), each)
        assert rows[state] == (may.produce, may.lease, True), state
    for observed in set(rows) - set(get_args(PartitionState)):
        assert rows[observed] == (False, False, False)


def test_the_steps_are_those_of_the_machine(page: str) -> None:
    assert tuple(row[0].strip("`") for row in table(page, "step")) == get_args(StepKind)


def commands(page: str) -> list[list[str]]:
    """The commands that it shows, in blocks and in passing."""
    in_blocks = [line.partition(" #")[0] for line in page.splitlines() if line.startswith("sluiceway ")]
    in_passing = re.findall(r"`(sluiceway [^`]+)`", page)
    return [shlex.split(each)[1:] for each in (*in_blocks, *in_passing)]


def test_every_command_is_one_that_the_program_takes(page: str) -> None:
    shown = commands(page)
    assert len(shown) > 20
    of = leaves()
    for arguments in shown:
        name = leaf_of(tuple(arguments))
        assert name, arguments
        rest = arguments[len(name.split()) :]
        if rest or " " not in name:
            try:
                of[name].make_context(name, list(rest))
            except click.MissingParameter:
                assert "`" not in rest, "in passing a command may be named without what it is about"
