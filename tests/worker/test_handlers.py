"""How a handler is found by its name, and what is said where it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluiceway.client import SluicewayError
from sluiceway.worker.handlers import is_async, load_handler

TASKS = """
class Mailer:
    def send(self, item): ...
    async def post(self, item): ...
    async def __call__(self, item): ...

mailer = Mailer()
limit = 3
def send(item): ...
async def post(item): ...
def nothing(): ...
def two(item, more): ...
def lazy(item): yield
async def lazy_async(item): yield
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module `wkr_tasks`, which is the current one."""
    (tmp_path / "wkr_tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("wkr_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "asynchronous"), [("send", False), ("post", True), ("mailer.send", False), ("mailer.post", True), ("mailer", True)]
)
def test_a_handler_is_a_function_a_method_or_an_object_that_can_be_called(tasks: Path, name: str, asynchronous: bool) -> None:
    assert is_async(load_handler(f"wkr_tasks:{name}")) is asynchronous


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("wkr_tasks", "'wkr_tasks' is not of the form module:function, such as tasks:send_email"),
        (":send", "is not of the form"),
        ("wkr_absent:send", "there is no module 'wkr_absent' in"),
        ("wkr_tasks:sent", "wkr_tasks has no 'sent'; its functions: lazy, lazy_async, nothing, post, send, two"),
        ("wkr_tasks:mailer.absent", "has no 'mailer.absent'"),
        ("./wkr_tasks.py:send", "'./wkr_tasks.py' is not a module; for the file tasks.py in this folder it is tasks:send"),
        ("wkr_tasks:nothing", "wkr_tasks:nothing() cannot be called with one argument, the item"),
        ("wkr_tasks:two", "wkr_tasks:two(item, more) cannot be called with one argument, the item"),
        ("wkr_tasks:lazy", "wkr_tasks:lazy is a generator: it would never be run"),
        ("wkr_tasks:lazy_async", "is a generator"),
        ("wkr_tasks:limit", "wkr_tasks:limit is a int, not a function"),
    ],
)
def test_a_handler_that_is_not_there_is_refused_with_what_is(tasks: Path, reference: str, said: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        load_handler(reference)
    assert refused.value.code == "invalid_request"
    assert said in refused.value.detail


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import wkr_missing_library\n", r"ModuleNotFoundError: No module named 'wkr_missing_library' \(.*wkr_broken.py:1\)"),
        ("x = 1\ny = x / 0\n", r"ZeroDivisionError: division by zero \(.*wkr_broken.py:2\)"),
        ("def send(item) pass\n", r"wkr_broken cannot be imported: .*wkr_broken.py, line 1"),
    ],
)
def test_an_error_within_the_module_is_named_with_its_line(tasks: Path, code: str, said: str) -> None:
    (tasks / "wkr_broken.py").write_text(code)
    with pytest.raises(SluicewayError, match=said):
        load_handler("wkr_broken:send")
