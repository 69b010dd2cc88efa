"""The types of the dashboard: pages, commands and their form fields."""

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
    """A page. `pattern` is its path; a segment {NAME} is passed in `visit.parts` and may also occur in `title`.

    `gather` calls the API for the template's variables and raises ProblemError. `template` is the live part, `still` the part above it
    that keeps the reader's input: tabs and filters. `room` is its entry in the navigation, `scripts` are assets. A page with `refreshes`
    False has no live updates.
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

    @property
    def is_of_queue(self) -> bool:
        """Whether it is a page of one queue, the only segment of its pattern."""
        return self.pattern.startswith("/ui/queues/{")

    def match(self, path: str) -> Mapping[str, str] | None:
        """The segments of the path by the pattern's names; None if the path does not match."""
        found = self._expression.fullmatch(path)
        return None if found is None else found.groupdict()


@dataclass(frozen=True, slots=True)
class Field:
    """A form field of a command. `flag` is its command-line option; empty for an argument. `value` is the initial value.

    A `list` is words, an `area` text of several lines, passed on as it is. `choices` of a select are pairs of value and label. A `known`
    field is read-only: the page that opened the form has filled it in.

    `means` converts the text to the value of the API call, `words` to command-line words; the default is the text itself. A ticked flag
    with `gives` sets that field to that value.
    """

    name: str
    label: str
    kind: Literal["text", "number", "flag", "select", "list", "area", "known"] = "text"
    flag: str = ""
    hint: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    value: str = ""
    required: bool = False
    means: Callable[[str], object] | None = None
    words: Callable[[str], list[str]] | None = None
    gives: tuple[str, object] | None = None

    def text(self, given: Mapping[str, str]) -> str:
        """The field's text in a filled-in form. Browsers send the lines of an area with carriage returns."""
        text = given.get(self.name, "")
        return text.replace("\r\n", "\n") if self.kind == "area" else text.strip()


@dataclass(frozen=True, slots=True)
class Command:
    """An action of the reader: a call of the API with an equivalent on the command line.

    `says` explains the effect, `button` labels the button. `on` is the field with the queue that the scope `action` has to cover; empty:
    no queue. With `destroys` the reader confirms by typing the value of the field `typed`; empty: that of `on`. `cli` are the words of the
    command line. `then` is the path to continue at, with {FIELD} for values; empty: the same page.
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
    typed: str = ""
    then: str = ""
    note: str = ""
    """A notice that is shown with the result."""
    done: str = "done"
    """The outcome in the title of the result."""
    tells: bool = False
    """Whether the result shows the fields of the answer."""
    shape: Callable[[Facts], Facts] | None = None
    """Builds the fields of the call from those of the form; None: they are the same."""

    def values(self, given: Mapping[str, str]) -> Facts:
        """The fields of the call from a filled-in form, without blank ones. Raises `invalid_request`."""
        found: Facts = {}
        for field in self.fields:
            text = field.text(given)
            if field.kind == "flag":
                if text:
                    name, value = field.gives or (field.name, True)
                    if name in found:
                        raise invalid(field.name, f"{field.label}: cannot be combined with {name.replace('_', ' ')}")
                    found[name] = value
            elif text:
                found[field.name] = _value(field, text)
            elif field.required:
                raise invalid(field.name, f"{field.label} is required")
        return found if self.shape is None else self.shape(found)

    def line(self, given: Mapping[str, str]) -> str:
        """The equivalent command line."""
        words, flags = ["sluiceway", *self.cli.split()], []
        for field in self.fields:
            text = field.text(given)
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

    def confirmation(self, given: Mapping[str, str]) -> str:
        """What the reader types to confirm."""
        return given.get(self.typed or self.on, "")

    def goes_to(self, given: Mapping[str, str]) -> str:
        """The path to continue at; empty: the same page. Raises KeyError for a field that was not sent."""
        return self.then.format_map({name: quote(text.strip(), safe="") for name, text in given.items()})


_DIGITS: Final = 15
"""Maximum digits of a number: more than any field takes, and cheap to parse."""


def whole(text: str, field: str) -> int:
    """The text as a whole number of at least 0. Raises `invalid_request` with the field."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise invalid(field, f"{text[:40]!r} is not a whole number of at least 0")
    return int(text)


def problem_of(error: SluicewayError) -> ProblemError:
    """An invalid form value as a refusal by the API."""
    return ProblemError(400, error.code, error.detail, error.field or "")


def _value(field: Field, text: str) -> object:
    if field.means is not None:
        return field.means(text)
    if field.kind == "list":
        return text.split()
    return whole(text, field.name) if field.kind == "number" else text
