"""The blocking half of the client is what `tools/unasync.py` generates from the asyncio half."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluiceway.client import AsyncClient, Client

PUBLIC = [name for name, member in inspect.getmembers(AsyncClient, callable) if not name.startswith("_")]


@pytest.fixture(scope="module")
def tool(repository: Path) -> dict[str, Any]:
    return runpy.run_path(str(repository / "tools" / "unasync.py"))


@pytest.fixture(scope="module")
def made(tool: dict[str, Any]) -> dict[str, str]:
    rendered: dict[str, str] = tool["render"]()
    return rendered


def test_the_generated_files_are_current(repository: Path, tool: dict[str, Any], made: dict[str, str]) -> None:
    assert tool["differences"](repository, made) == "", "run: python tools/unasync.py"
    for path, text in made.items():
        assert text.startswith(f"# Generated from {tool['GENERATED'][path]} by `python tools/unasync.py`."), path


def test_a_difference_is_found(tool: dict[str, Any], made: dict[str, str], tmp_path: Path) -> None:
    for path, text in made.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    assert tool["differences"](tmp_path, made) == ""
    changed, missing = made
    (tmp_path / changed).write_text(made[changed].replace("time.sleep(", "time.sleep(1 + "), encoding="utf-8")
    (tmp_path / missing).unlink()
    found = tool["differences"](tmp_path, made)
    assert f"--- {changed}\n" in found
    assert "\n-                time.sleep(1 + repeats" in found
    assert "\n+                time.sleep(repeats" in found
    assert f"--- {missing}\n" in found


def test_the_check_fails_on_a_difference(tool: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main: Callable[[], int] = tool["main"]
    monkeypatch.setattr("sys.argv", ["unasync.py", "--check"])
    assert main() == 0
    render = main.__globals__["render"]
    monkeypatch.setitem(main.__globals__, "render", lambda: {path: f"{text}\n# more" for path, text in render().items()})
    assert main() == 1


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("async def call(self) -> int:\n    return await self.run()\n", "def call(self) -> int:\n    return self.run()\n"),
        ("async with contextlib.aclosing(parts):\n    pass\n", "with contextlib.closing(parts):\n    pass\n"),
        ("async def f(parts: AsyncIterator[int]) -> None: ...\n", "def f(parts: Iterator[int]) -> None: ...\n"),
        ("await asyncio.sleep(await pause())\n", "time.sleep(pause())\n"),
        ("def f() -> AsyncGenerator[dict[str, int], None]: ...\n", "def f() -> Generator[dict[str, int], None, None]: ...\n"),
        (
            'class AsyncClient:\n    """Beside `AsyncClient`.\n\n    Do not await it.\n    """\n',
            'class Client:\n    """Beside `AsyncClient`.\n\n    Do not await it.\n    """\n',
        ),
        ("awaited = {'await': 1}  # async, as AsyncClient\n", "awaited = {'await': 1}  # async, as AsyncClient\n"),
    ],
)
def test_what_is_translated(tool: dict[str, Any], source: str, code: str) -> None:
    assert tool["translated"](source) == code


@pytest.mark.parametrize("name", ["asyncio.gather(a, b)", "AsyncThing()", "response.aiter_text()", "self.__anext__()"])
def test_an_unknown_asynchronous_name_is_refused(tool: dict[str, Any], name: str) -> None:
    assert tool["leftovers"](tool["translated"](f"found = {name}\n"))


@pytest.mark.parametrize("name", PUBLIC)
def test_both_halves_have_the_same_calls(name: str) -> None:
    blocking, awaited = getattr(Client, name), getattr(AsyncClient, name)
    assert list(inspect.signature(blocking).parameters.values()) == list(inspect.signature(awaited).parameters.values())
    doc = inspect.getdoc(awaited)
    assert doc
    assert inspect.getdoc(blocking) == doc


def test_neither_half_has_a_call_of_its_own() -> None:
    assert [name for name, _ in inspect.getmembers(Client, callable) if not name.startswith("_")] == PUBLIC
