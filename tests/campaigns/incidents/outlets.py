"""Where an operator looks: the overview page, `sluiceway doctor` and `sluiceway top`. Each is asked again and again until it names what is
wrong."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import httpx

from tests.server.server_process import COMMAND, PATIENCE

LIMIT: Final = 15.0
"""Seconds from the beginning of an incident until each of them must have named it."""
_GIVEN_UP: Final = 60.0
"""Seconds after which an incident is not named any more: until then, how late it is says more than that it is late."""


def overview(url: str) -> Callable[[str, str], bool]:
    def names(kind: str, subject: str) -> bool:
        return _found(rf'id="problem-{kind}-{subject}"', httpx.get(f"{url}/ui", timeout=PATIENCE).text)

    return names


def doctor(url: str) -> Callable[[str, str], bool]:
    def names(kind: str, subject: str) -> bool:
        told = json.loads(_command("--url", url, "--json", "doctor"))
        return any(_found(rf"^{kind}: {subject}: ", f"{each['name']}: {each['detail']}") for each in told["checks"])

    return names


def top(url: str) -> Callable[[str, str], bool]:
    def names(kind: str, subject: str) -> bool:
        return _found(rf" {kind}: {subject}: ", " ".join(_command("--url", url, "top", "--once").split()))

    return names


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def _command(*arguments: str) -> str:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE).stdout


def watch(url: str, kind: str, subject: str, began: float) -> Mapping[str, float]:
    """Seconds from `began` (`time.monotonic`) until each outlet named it; _GIVEN_UP: it did not. `kind` and `subject` are regular
    expressions."""
    seen: dict[str, float] = {}
    outlets = {"overview": overview(url), "doctor": doctor(url), "top": top(url)}

    def ask(name: str) -> None:
        while time.monotonic() - began < _GIVEN_UP:
            if outlets[name](kind, subject):
                seen[name] = time.monotonic() - began
                return
            time.sleep(0.2)
        seen[name] = _GIVEN_UP

    threads = [threading.Thread(target=ask, args=(name,)) for name in outlets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen
