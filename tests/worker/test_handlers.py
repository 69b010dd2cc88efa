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
        ("wkr_tasks:sent", "wkr_tasks has no 'sent'; its functions: post, send"),
        ("wkr_tasks:mailer.absent", "has no 'mailer.absent'"),
        ("wkr_tasks:limit", "wkr_tasks:limit is a int, not a function"),
    ],
)
def test_a_handler_that_is_not_there_is_refused_with_what_is(tasks: Path, reference: str, said: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        load_handler(reference)
    assert refused.value.code == "invalid_request"
    assert said in refused.value.detail


def test_an_error_within_the_module_is_shown_as_it_is(tasks: Path) -> None:
    (tasks / "wkr_broken.py").write_text("import wkr_missing_library\n")
    with pytest.raises(ModuleNotFoundError, match="wkr_missing_library"):
        load_handler("wkr_broken:send")
