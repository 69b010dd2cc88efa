"""The page of a worker, to whoever can reach it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx
import pytest

from sluiceway.worker import status_page
from sluiceway.worker.counts import Counts
from sluiceway.worker.status_page import StatusPage
from tests.server.server_process import PATIENCE, wait_until


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusPage]:
    monkeypatch.setattr(status_page, "PATIENCE", 1.0)
    monkeypatch.setattr(status_page, "MAX_CONNECTIONS", 3)
    with StatusPage(("127.0.0.1", 0), "q", lambda: [Counts()], Counts) as page:
        yield page


def connection(page: StatusPage, stack: ExitStack) -> socket.socket:
    parts = urlsplit(page.url)
    made = stack.enter_context(socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE))
    return made


def is_served(page: StatusPage) -> bool:
    try:
        return httpx.get(f"{page.url}/healthz", timeout=PATIENCE).text == "ok\n"
    except httpx.TransportError:
        return False


def test_silent_connections_are_few_and_go(page: StatusPage) -> None:
    with ExitStack() as stack:
        silent = [connection(page, stack) for _ in range(3)]
        beyond = connection(page, stack)
        with suppress(ConnectionError):
            assert beyond.recv(1) == b""
        assert [each.recv(1) for each in silent] == [b"", b"", b""], "they were waited for without end"
        wait_until(lambda: is_served(page), "the page being served again")


def test_it_says_what_it_is_asked_for(page: StatusPage) -> None:
    assert is_served(page)
    assert httpx.get(f"{page.url}/readyz").text == "ok\n"
    assert "sluiceway_worker" in httpx.get(f"{page.url}/metrics").text
    assert httpx.get(f"{page.url}/../etc/passwd").status_code == 404
