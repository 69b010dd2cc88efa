"""Whoever has no mouse: the keyboard reaches all there is, one sees where one is, and no dialog holds anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.conftest import Opens
from tests.e2e.harness import PHONE, STILL, is_shown
from tests.e2e.test_pages import PAGES, path_of
from tests.server.test_server_reload import Child

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.e2e

# Of radio buttons only one takes the focus, and arrows lead to the others.
WANTED = """() => {
  const all = "a[href], button, input:not([type=hidden], [type=radio]), select, textarea, summary, [tabindex]";
  window.wanted = [...document.querySelectorAll(all)].filter(each => each.tabIndex >= 0 && !each.disabled && each.checkVisibility());
  window.visited = new Set();
  return wanted.length;
}"""
HERE = """() => {
  const at = document.activeElement;
  if (!at || at === document.body || visited.has(at)) return null;
  visited.add(at);
  // The box of what is drawn has what is clipped off in it, too.
  const drawn = at instanceof SVGElement ? at.querySelector(".edge") ?? at : at;
  const box = drawn.getClientRects()[0] ?? drawn.getBoundingClientRect(), style = getComputedStyle(at);
  const x = (Math.max(box.left, 0) + Math.min(box.right, innerWidth)) / 2;
  const y = (Math.max(box.top, 0) + Math.min(box.bottom, innerHeight)) / 2;
  const top = document.elementFromPoint(x, y);
  return {
    what: at.outerHTML.slice(0, 140),
    covered: !top || !(at.contains(top) || top.contains(at)),
    outlined: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
    clip: {x: Math.max(box.left - 6, 0), y: Math.max(box.top - 6, 0), width: box.width + 12, height: box.height + 12},
  };
}"""
LEFT = """() => wanted.filter(each => each.isConnected && each.checkVisibility() && !visited.has(each))
  .map(each => each.outerHTML.slice(0, 140))"""


def marked(page: Page, clip: dict[str, Any]) -> bool:
    """Whether what has the focus looks otherwise without it."""
    scrolled = {**clip, "x": clip["x"] + page.evaluate("scrollX"), "y": clip["y"] + page.evaluate("scrollY")}
    area: Any = scrolled
    focused = page.screenshot(clip=area, full_page=True)
    page.evaluate("window.was = document.activeElement; was.blur()")
    without = page.screenshot(clip=area, full_page=True)
    page.evaluate("was.focus()")
    return focused != without


@pytest.mark.parametrize("name", PAGES)
def test_the_keyboard_reaches_all_of_a_page(name: str, filled: Child, reader: Opens) -> None:
    # What comes into sight does so at once.
    page = reader(filled, STILL).open(path_of(name, filled))
    problems = []
    count = page.evaluate(WANTED)
    for _ in range(count + 20):
        page.keyboard.press("Tab")
        here = page.evaluate(HERE)
        if here is None:
            break
        if here["covered"]:
            problems.append(f"cannot be seen: {here['what']}")
        elif not here["outlined"] and not marked(page, here["clip"]):
            problems.append(f"does not show that it has the focus: {here['what']}")
    problems += [f"not reached: {each}" for each in page.evaluate(LEFT)]
    assert not problems, "\n".join(problems)


def test_the_first_key_leads_to_the_content(filled: Child, reader: Opens) -> None:
    page = reader(filled).open("/ui/queues")
    page.keyboard.press("Tab")
    skip = page.locator(".skip")
    assert skip.evaluate("each => each === document.activeElement")
    page.wait_for_function("() => document.activeElement.getBoundingClientRect().top >= 0")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.id === 'main'")


def test_the_menu_of_a_narrow_page(filled: Child, reader: Opens) -> None:
    page = reader(filled, PHONE).open("/ui")
    link = page.locator("#menu").get_by_role("link", name="Queues")
    assert link.is_hidden()
    page.locator("#menu summary").focus()
    page.keyboard.press("Enter")
    link.wait_for(state="visible")
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/queues")


@pytest.mark.parametrize("key", ["Enter", " "])
def test_a_dialog_takes_the_focus_and_gives_it_back(key: str, filled: Child, reader: Opens) -> None:
    page = reader(filled).open("/ui/queues")
    button = page.get_by_role("button", name="Create a queue")
    button.focus()
    page.keyboard.press(key)
    is_shown(page, "#dialog", "Create a queue")
    page.wait_for_function("() => document.getElementById('dialog').contains(document.activeElement)")
    for _ in range(30):
        page.keyboard.press("Tab")
        # Outside of the dialog there is only the browser itself.
        assert not page.evaluate("document.activeElement.closest('header, main') !== null")
    page.keyboard.press("Escape")
    page.locator("#dialog").wait_for(state="hidden")
    assert button.evaluate("each => each === document.activeElement")
