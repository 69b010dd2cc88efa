"""A large server is as usable as a small one: a hundred queues, and a queue with a thousand partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from sluiceway.client import Client
from tests.e2e.conftest import Opens
from tests.e2e.harness import FIRST_PAINT, PHONE_DARK, WEIGHT, WIDE, Look, axe, changes, first_paint, fits, is_shown
from tests.server.test_server_reload import Child, child

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.e2e

PARTITIONS = 1_000
PAGES = {
    "overview": "/ui",
    "queues": "/ui/queues",
    "queue": "/ui/queues/large",
    "partitions": "/ui/queues/large/partitions",
    "map": "/ui/queues/large/map",
    "instances": "/ui/instances",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with child(tmp_path_factory.mktemp("large"), "[backends.a]\nkind = 'memory'\n[backends.b]\nkind = 'memory'\n") as server:
        with Client(server.url) as client:
            client.create_queue("large", requested_partitions=PARTITIONS)
            for number in range(100):
                client.create_queue(f"queue-{number:03}")
            for _ in range(40):
                client.produce("large", ["an item"] * 250)
        yield server


@pytest.mark.parametrize("look", [WIDE, PHONE_DARK], ids=lambda look: look.name)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_many(name: str, look: Look, large: Child, reader: Opens, shot: Callable[[Page, str], None]) -> None:
    them = reader(large, look)
    page = them.open(PAGES[name])
    weight, paint = them.weight(page), first_paint(them, PAGES[name])
    print(f"{name} of many: {weight / 1000:.1f} kB, first paint after {paint:.0f} ms")
    assert weight < WEIGHT
    assert paint < FIRST_PAINT
    fits(page)
    axe(page)
    shot(page, f"many-{name}-{look.name}")


def test_what_happens_among_many_is_seen(large: Child, reader: Opens) -> None:
    page = reader(large).open("/ui/queues")
    with Client(large.url) as client:
        client.produce("queue-007", ["one", "two"])
    page.locator("#name").fill("queue-007")
    changes(page, "#q-queue-007 td.n", lambda text: text == "2")
    assert page.locator("#queues tbody tr:visible").count() == 1


def test_partitions_are_read_a_page_at_a_time(large: Child, reader: Opens) -> None:
    page = reader(large).open("/ui/queues/large/partitions?sort=-ready")
    with Client(large.url) as client:
        where = client.produce("large", ["x"] * 1_000).partition
    changes(page, "#partitions tbody tr:first-child", lambda text: text.startswith(f"{where}\t"))
    assert page.locator("#partitions tbody tr").count() == 200
    page.get_by_role("link", name="Next page").click()
    is_shown(page, ".more", "201 to 400 of 1,000")
    fits(page)
