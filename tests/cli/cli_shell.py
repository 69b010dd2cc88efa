"""Commands of the command line, run in this process against one server."""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable
from typing import Any

import click
import pytest

from sluiceway.cli import main


class _Stdin(io.TextIOWrapper):
    def __init__(self, content: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(content))
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def leaves(command: click.Command = main.cli, path: str = "") -> dict[str, click.Command]:
    """Every command that does something, by its name such as `queue create`."""
    if not isinstance(command, click.Group):
        return {path: command}
    found: dict[str, click.Command] = {}
    for name, each in commands_of(command).items():
        found |= leaves(each, f"{path} {name}".strip())
    return found


def commands_of(group: click.Group) -> dict[str, click.Command]:
    found = {name: group.get_command(click.Context(group), name) for name in group.list_commands(click.Context(group))}
    return {name: each for name, each in found.items() if each is not None}


def leaf_of(arguments: tuple[str, ...]) -> str:
    """The name of the command that these call."""
    return next((name for name in leaves() if arguments[: name.count(" ") + 1] == tuple(name.split())), "")


class Shell:
    """Runs commands against the server that the environment names. `queue` is for the test to use.

    `done` has the commands that ended well, and whether as JSON.
    """

    def __init__(self, queue: str, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[bytes]) -> None:
        self.queue = queue
        self.done: set[tuple[str, bool]] = set()
        self._monkeypatch = monkeypatch
        self._capture = capture

    def ends(self, *arguments: str, stdin: bytes = b"", terminal: bool = False) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)"""
        self._monkeypatch.setattr(sys, "argv", ["sluiceway", *arguments])
        self._monkeypatch.setattr(sys, "stdin", _Stdin(stdin, terminal))
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = self._capture.readouterr()
        assert isinstance(ended.value.code, int)
        if ended.value.code == 0:
            self.note(*arguments)
        return ended.value.code, out.decode(), err.decode()

    def note(self, *arguments: str) -> None:
        """These were run and ended well."""
        self.done.add((leaf_of(arguments), "--json" in arguments))

    def says(self, *arguments: str, stdin: bytes = b"") -> str:
        code, out, err = self.ends(*arguments, stdin=stdin)
        assert code == 0, err
        return out

    def json(self, *arguments: str, stdin: bytes = b"") -> list[dict[str, Any]]:
        """The objects that it prints, one a line."""
        return [json.loads(line) for line in self.says(*arguments, "--json", stdin=stdin).splitlines()]


WITHOUT_JSON = {"completion", "demo"}
"""A script is no data; the demo shows people something, and writes its figures into files."""


def covering(covered: set[str]) -> Callable[..., Callable[[Callable[..., None]], Callable[..., None]]]:
    """A decorator that names the commands that a test covers; the test must run each with success, both ways."""

    def verb(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def wrap(test: Callable[..., None]) -> Callable[..., None]:
            covered.update(names)

            @functools.wraps(test)
            def run(shell: Shell, **fixtures: object) -> None:
                test(shell=shell, **fixtures)
                wanted = {(name, as_json) for name in names for as_json in (False, True) if not (as_json and name in WITHOUT_JSON)}
                assert wanted <= shell.done

            return run

        return wrap

    return verb


REBALANCES = {
    *(f"rebalance {name}" for name in ("plan", "start", "watch", "list", "show", "cancel")),
    *("partition pause", "partition resume"),
}
CAPTURES = {"spark capture"}
JOBS = {"spark ingest", "spark process"}
ARCHIVES = {"spark archive"}
REDRIVES = {"spark redrive"}
COPIES = {"spark copy"}
DEMO = {"demo"}
"""Commands that have their tests in files of their own."""
