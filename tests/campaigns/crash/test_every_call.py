"""One call of an instance, crashed at each of its system calls in turn: it has happened whole or not at all, and can be repeated."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluiceway.kernel.errors import SluicewayError
from tests.campaigns.crash import every_call
from tests.campaigns.crash.aftermath import Aftermath, aftermath
from tests.campaigns.crash.every_call import BASE_ITEMS, CALLS, NEW_ITEMS
from tests.instance.instance_rig import produce, serving

pytestmark = pytest.mark.crash

BASE = Counter(BASE_ITEMS)
WITHOUT_TWO = Counter(BASE_ITEMS[2:])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "data"

    async def make() -> None:
        async with serving(directory) as (service, _):
            await every_call.prepare(service)

    asyncio.run(make())
    return directory


def crashes(call: str, base: Path, copies: Path) -> list[dict[str, Any]]:
    """Every crash of the call, and at the end its success without one; at least so many of each way."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, every_call.__file__, call, str(base), str(copies)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert sum(report["crashed"] for report in reports) >= 6, "it hardly wrote anything"
    return reports


def again(directory: Path, call: str) -> Any:
    """The same call, after a restart; the code of its error if it has one."""

    async def work() -> Any:
        async with serving(directory) as (service, _):
            try:
                return await CALLS[call](service)
            except SluicewayError as error:
                return error.code

    return asyncio.run(work())


def nothing_new(_answer: Any, _repeated: Any, left: Aftermath) -> bool:
    return left == (BASE, Counter())


def produced_once(answer: Any, repeated: Any, left: Aftermath) -> bool:
    return left == (BASE + Counter(NEW_ITEMS), Counter()) and answer in (None, repeated)


def the_same_lease(answer: Any, repeated: Any, left: Aftermath) -> bool:
    return left == (BASE, Counter()) and answer in (None, repeated) and repeated[0][2] == 2


def completed(answer: Any, repeated: Any, left: Aftermath) -> bool:
    return left == (WITHOUT_TWO, Counter()) and (repeated in (0, 2) if answer is None else repeated == 0)


def closed(answer: Any, repeated: Any, left: Aftermath) -> bool:
    return left == (WITHOUT_TWO + Counter("a"), Counter()) and (repeated in ([0, 0], [1, 1]) if answer is None else repeated == [0, 0])


def buried(_answer: Any, _repeated: Any, left: Aftermath) -> bool:
    return left == (WITHOUT_TWO, Counter("ab"))


def created(answer: Any, repeated: Any, left: Aftermath) -> bool:
    return left == (BASE, Counter()) and (answer is None or repeated == "queue_exists")


AFTER: dict[str, Callable[[Any, Any, Aftermath], bool]] = {
    "start": nothing_new,
    "create": created,
    "produce": produced_once,
    "lease": the_same_lease,
    "complete": completed,
    "close": closed,
    "bury": buried,
}


DONE_ALONE = {"produce": BASE + Counter(NEW_ITEMS), "complete": WITHOUT_TWO, "lease": BASE, "start": BASE}
"""What is left of a call that is not repeated, if it has happened."""


def usable(directory: Path) -> bool:
    async def work() -> bool:
        async with serving(directory) as (service, _):
            return (await produce(service, "new", "x")).items == 1

    return asyncio.run(work())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.slow
def test_a_crash_at_any_system_call_leaves_all_or_nothing(tmp_path: Path, base: Path, call: str) -> None:
    happened: set[bool] = set()
    for report in crashes(call, base, tmp_path):
        directory = tmp_path / report["copy"]
        if call in DONE_ALONE:
            alone = tmp_path / f"{report['copy']}-alone"
            shutil.copytree(directory, alone)
            found = aftermath(alone).waiting
            assert found == DONE_ALONE[call] or (found == BASE and report["answer"] is None), (report, found)
            happened.add(found == DONE_ALONE[call])
        repeated = again(directory, call)
        left = aftermath(directory)
        assert AFTER[call](report["answer"], repeated, left), (report, repeated, left)
        assert call != "create" or usable(directory)
    assert call not in ("produce", "complete") or happened == {False, True}
