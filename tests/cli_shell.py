"""Commands of the command line, run in this process against one server."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from sluiceway.cli import main


class _Stdin(io.TextIOWrapper):
    def __init__(self, content: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(content))
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Shell:
    """Runs commands against the server that the environment names. `queue` is for the test to use."""

    def __init__(self, queue: str, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[bytes]) -> None:
        self.queue = queue
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
        return ended.value.code, out.decode(), err.decode()

    def says(self, *arguments: str, stdin: bytes = b"") -> str:
        code, out, err = self.ends(*arguments, stdin=stdin)
        assert code == 0, err
        return out

    def json(self, *arguments: str, stdin: bytes = b"") -> list[dict[str, Any]]:
        """The objects that it prints, one a line."""
        return [json.loads(line) for line in self.says(*arguments, "--json", stdin=stdin).splitlines()]
