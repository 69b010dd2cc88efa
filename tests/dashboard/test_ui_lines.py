"""What the dashboard says to type in a terminal is a command line, as it stands."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files

import click
import pytest
from click.testing import CliRunner

from sluiceway.cli.main import cli
from sluiceway.server.ui.pages import audit, dead

STANDING_FOR = {"KIND": "queue", "URL": "http://127.0.0.1:1"}
"""Words in place of which the reader writes what they have, and of which the parser knows what they may be."""


def lines_of(template: str) -> list[str]:
    """The command lines in its markup and in its texts, with some word for each expression."""
    marked = [re.sub(r"\{\{.*?\}\}", "x", line) for line in re.findall(r"<code>(sluiceway .*?)</code>", template)]
    joined = re.sub(r'(?<= )" ~ [\w.]+', 'x"', re.sub(r'" ~ [\w.]+ ~ "', "x", template))
    return marked + re.findall(r'"(sluiceway [^"]*)"', joined)


TEMPLATES = [each.read_text("utf-8") for each in files("sluiceway.server.ui").joinpath("templates").iterdir()]
LINES = [line for template in TEMPLATES for line in lines_of(template)]


def parsed(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is wrong with it; nothing is done."""
    program, *words = shlex.split(line)
    assert program == "sluiceway"
    # Groups find their commands by a method of their own.
    monkeypatch.setattr(click.Command, "invoke", lambda *_: None)
    answer = CliRunner().invoke(cli, [STANDING_FOR.get(word, word) for word in words])
    return "" if answer.exit_code == 0 else answer.output


@pytest.mark.parametrize("line", sorted(set(LINES)))
def test_a_line_in_a_template_can_be_typed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(line, monkeypatch) == ""


def test_each_of_them_is_looked_at_and_a_wrong_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(LINES) == sum(len(re.findall(r"\bsluiceway [a-z]", template)) for template in TEMPLATES)
    assert "Missing option '--meta'" in parsed("sluiceway spark capture NAME --stream KIND --to URL --queue Q", monkeypatch)


def test_lines_for_what_was_filled_in_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"queue_name": "q", "action": "queue.*", "actor": "it's me", "since": "2h", "until": "2026-01-31T08:00:00Z"}
    wanted = {"source": "a", "reason": "it's", "target": "b", "limit": 5, "rate": 10}
    for line in (audit._line(given), audit._line({}), dead._line("d", wanted), dead._line("d", {})):
        assert parsed(line, monkeypatch) == ""
