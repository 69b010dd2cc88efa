"""One browser for all of these tests, and servers that several of them look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.filled_server import BACKENDS, fill, guarded
from tests.e2e.harness import ROOT, WIDE, Look, Reader, started
from tests.server.test_server_reload import Child, child

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Opens = Callable[..., Reader]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shots", default=str(ROOT / "build" / "e2e"), help="directory for screenshots")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with started() as found:
        yield found


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """A server with queues in every state, which nobody changes."""
    with child(tmp_path_factory.mktemp("filled"), BACKENDS) as server:
        fill(server)
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Child]:
    """A test's own."""
    with child(tmp_path, BACKENDS) as found:
        yield found


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Child]:
    """A test's own that asks for API keys."""
    with guarded(tmp_path) as found:
        yield found


@pytest.fixture
def reader(browser: Browser) -> Iterator[Opens]:
    """Makes readers: of a server, with a look, and with what they may complain of."""
    made: list[Reader] = []

    def make(server: Child, look: Look = WIDE, *allow: str) -> Reader:
        made.append(Reader(browser, server.url, look, allow))
        return made[-1]

    yield make
    for each in made:
        each.__exit__(None, None, None)


@pytest.fixture
def shot(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """Keeps a picture of a page, all of it, under a name."""
    folder = Path(request.config.getoption("--shots"))

    def take(page: Page, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=folder / f"{name}.png", full_page=True)

    return take
