"""What the dashboard has: one table of pages, and one of what a reader can have done."""

from __future__ import annotations

import re
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal
from urllib.parse import quote

from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.model.access import Action
from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.visit import Visit

Gather = Callable[[Visit], Awaitable[Facts]]


@dataclass(frozen=True)
class View:
    """A page. `pattern` is its path, with {NAME} for a segment that `visit.parts` has then; they may be in the `title`, too.

    `gather` asks the API for what is shown, and raises ProblemError. `template` is what goes on by itself, `still` what does not and
    is above it: tabs, filters, whatever has the reader's input in it. `room` is its place in the navigation. `scripts` are assets.
    `refreshes` False: it is shown as it was when it was asked for.
    """

    pattern: str
    title: str
    template: str
    gather: Gather
    room: str
    still: str = ""
    scripts: tuple[str, ...] = ()
    refreshes: bool = True

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[A-Za-z0-9_.\\-]{1,128})", self.pattern))

    def match(self, path: str) -> Mapping[str, str] | None:
        """The segments that the path has for the pattern's names; None if it is another page's."""
        found = self._expression.fullmatch(path)
        return None if found is None else found.groupdict()


@dataclass(frozen=True, slots=True)
class Field:
    """Something to fill in for a command. `flag` is the command line's; empty: it is said by its place. `choices` of a select have a label
    each. `value` is there to begin with. `known`: the reader came from where it is known, and only sees it.

    `means` makes of what was filled in what the call has, and `words` what the command line has; without them it is the text itself.
    `gives`: a ticked flag says this instead, a name and a value.
    """

    name: str
    label: str
    kind: Literal["text", "number", "flag", "select", "list", "known"] = "text"
    flag: str = ""
    hint: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    value: str = ""
    required: bool = False
    means: Callable[[str], object] | None = None
    words: Callable[[str], list[str]] | None = None
    gives: tuple[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """What a reader can have done: a call of the API, which the command line has, too.

    `says` is what it does, to read before; `button` what is on the button. `on` is the field with the queue for which the scope `action` is
    needed; empty: for none. `destroys`: the reader has to repeat what the field `on` has. `cli` is the command's words. `then`: where one
    wants to be afterwards, a path with {FIELD} for what was filled in; empty: on the same page.
    """

    name: str
    title: str
    button: str
    says: str
    call: str
    action: Action
    cli: str
    fields: tuple[Field, ...] = ()
    on: str = "queue_name"
    destroys: bool = False
    then: str = ""
    note: str = ""
    """What is to be known once it is done."""
    done: str = "done"
    """What is said of it then."""
    tells: bool = False
    """The answer has what one wants to know; that of most others is the whole of what was changed."""

    def values(self, given: Mapping[str, str]) -> Facts:
        """The fields of the call, of what was filled in: nothing for what was left empty. Raises `invalid_request`."""
        found: Facts = {}
        for field in self.fields:
            text = given.get(field.name, "").strip()
            if field.kind == "flag":
                if text:
                    name, value = field.gives or (field.name, True)
                    if name in found:
                        raise invalid(field.name, f"{field.label}: this and {name.replace('_', ' ')} exclude each other")
                    found[name] = value
            elif text:
                found[field.name] = _value(field, text)
            elif field.required:
                raise invalid(field.name, f"{field.label}: fill it in")
        return found

    def line(self, given: Mapping[str, str]) -> str:
        """What does the same in a terminal."""
        words, flags = ["sluiceway", *self.cli.split()], []
        for field in self.fields:
            text = given.get(field.name, "").strip()
            if not text:
                continue
            if field.words is not None:
                flags += field.words(text)
            elif field.kind == "flag":
                flags.append(field.flag)
            elif field.kind == "list":
                each_flag = [field.flag] if field.flag else []
                flags += [word for each in text.split() for word in (*each_flag, each)]
            elif field.flag:
                flags += [*field.flag.split(), text]
            else:
                words.append(text)
        return shlex.join([*words, *flags])

    def goes_to(self, given: Mapping[str, str]) -> str:
        """Where one wants to be when it is done; empty: on the same page. Raises KeyError for what was not filled in."""
        return self.then.format_map({name: quote(text.strip(), safe="") for name, text in given.items()})


_DIGITS: Final = 15
"""Of a number that is filled in: far more than any field takes, and read in no time."""


def whole(text: str, field: str) -> int:
    """The whole number that was filled in, from 0 on. Raises `invalid_request`, which names the field."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise invalid(field, f"{text[:40]!r} is not a whole number from 0 on")
    return int(text)


def problem_of(error: SluicewayError) -> ProblemError:
    """What the reader has filled in and cannot be asked of the API, as if the API had refused it."""
    return ProblemError(400, error.code, error.detail, error.field or "")


def _value(field: Field, text: str) -> object:
    if field.means is not None:
        return field.means(text)
    if field.kind == "list":
        return text.split()
    return whole(text, field.name) if field.kind == "number" else text
