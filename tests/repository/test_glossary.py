"""The glossary leads: its words are those of the code, each has one meaning, and a word that was given up does not come back."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

GIVEN_UP = ["lane", "fate"]
"""No identifier of the package has one of these words in it: docs/reference/glossary.md says partition executor, disposition."""
_MODULES = """
away board closed dealing forming gate inspecting looking parts share spreading line rules beating placing few burial closing demand
following moving sending served share_calls task_chores delivery answer_memory assembly
direct seats waiting rooms keeper descent begun shown asked trail
"""
"""Former names of modules, none of which says what is in it."""
STILL = {"direct": "client/direct.py sends calls directly to the owners of partitions: the option of the client is called so"}


@cache
def source(repository: Path) -> str:
    """All Python of the package and the simulation, in which `_` and capitals part words."""
    text = " ".join(path.read_text() for root in ("src", "simulation") for path in sorted((repository / root).rglob("*.py")))
    return re.sub(r"[_\s]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower()


def words(repository: Path) -> list[str]:
    text = (repository / "docs" / "reference" / "glossary.md").read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    return [word.strip() for row in rows if row not in ("word", "---") for word in row.split(",")]


def test_every_word_of_the_glossary_is_one_of_the_code(repository: Path) -> None:
    found = words(repository)
    assert len(found) > 80
    assert not [word for word in found if not re.search(rf"\b{re.escape(word.lower())}(s|es|d|ed|ing)?\b", source(repository))]


def test_no_word_of_the_glossary_has_two_meanings(repository: Path) -> None:
    found = words(repository)
    assert not {word for word in found if found.count(word) > 1}


def test_no_word_that_was_given_up_is_in_an_identifier(repository: Path) -> None:
    assert not [word for word in GIVEN_UP if re.search(rf"\b{word}s?\b", source(repository))]


def test_no_module_has_a_name_that_was_given_up(repository: Path) -> None:
    roots = (repository / "src", repository / "simulation")
    found = {path.stem for root in roots for path in root.rglob("*.py")}
    assert found & set(_MODULES.split()) == set(STILL)
