"""Every page, at both widths, light and dark: it shows all there is without a complaint, and costs little."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import Opens
from tests.e2e.filled_server import tell
from tests.e2e.harness import FIRST_PAINT, LOOKS, STILL, WEIGHT, WIDE, Look, axe, first_paint, fits
from tests.server.test_server_reload import Child

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.e2e

PAGES = {
    "overview": "/ui",
    "queues": "/ui/queues",
    "queue": "/ui/queues/orders",
    "queue-items": "/ui/queues/orders/items",
    "queue-dead": "/ui/queues/orders/dead",
    "queue-settings": "/ui/queues/orders/settings",
    "queue-partitions": "/ui/queues/orders/partitions",
    "queue-consumers": "/ui/queues/orders/consumers",
    "queue-audit": "/ui/queues/orders/audit",
    "queue-map": "/ui/queues/orders/map",
    "queue-redrive": "/ui/queues/orders-dead/redrive",
    "map": "/ui/map",
    "instances": "/ui/instances",
    "rounds": "/ui/rounds",
    "rebalances": "/ui/rebalances",
    "rebalance": "/ui/rebalances/{rebalance}",
    "schedules": "/ui/schedules",
    "schedule": "/ui/schedules/close-day",
    "dead": "/ui/dead",
    "tasks": "/ui/captures",
    "task": "/ui/captures/feed",
    "spark": "/ui/spark",
    "audit": "/ui/audit",
    "audit-older": "/ui/audit/older",
    "settings": "/ui/settings",
    "settings-keys": "/ui/settings/keys",
}


def path_of(name: str, server: Child) -> str:
    """Where that page is, on a server that was filled."""
    tell(server)
    return PAGES[name].replace("{rebalance}", server.ask("rebalances.list")["items"][0]["id"])


def test_all_pages_are_looked_at() -> None:
    from sluiceway.server.ui.routes import ROOMS, VIEWS

    left = [view.pattern for view in VIEWS if not any(view.match(path.replace("{rebalance}", "id")) is not None for path in PAGES.values())]
    assert not left
    assert {path for _, path in ROOMS} <= set(PAGES.values())


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.name)
@pytest.mark.parametrize("name", PAGES)
def test_a_page(name: str, look: Look, filled: Child, reader: Opens, shot: Callable[[Page, str], None]) -> None:
    page = reader(filled, look).open(path_of(name, filled))
    shot(page, f"{name}-{look.name}")
    # Whatever a payload, a reason or a name says is text.
    assert page.title() != "owned"
    assert not page.locator("img[onerror]").count()
    fits(page)
    axe(page)


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_costs(name: str, filled: Child, reader: Opens) -> None:
    them = reader(filled, WIDE)
    path = path_of(name, filled)
    weight, paint = them.weight(them.open(path)), first_paint(them, path)
    print(f"{name}: {weight / 1000:.1f} kB, first paint after {paint:.0f} ms")
    assert weight < WEIGHT
    assert paint < FIRST_PAINT


@pytest.mark.parametrize("name", PAGES)
def test_nothing_moves_for_who_wants_that(name: str, filled: Child, reader: Opens) -> None:
    page = reader(filled, STILL).open(path_of(name, filled))
    moving = page.evaluate(
        "() => document.getAnimations().filter(each => each.playState === 'running' && each.effect.getComputedTiming().duration > 1).length"
    )
    assert moving == 0
