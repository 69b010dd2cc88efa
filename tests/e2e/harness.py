"""The dashboard as a reader has it: real pages of a real server in a real Chromium, and what of them must always hold."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

ROOT: Final = Path(__file__).resolve().parent.parent.parent
AXE: Final = ROOT / ".tools" / "axe" / "axe.min.js"
RULES: Final = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa")
"""What of axe's rules is asked: those of WCAG 2.2 AA."""
PATIENCE: Final = 30.0
"""Seconds until a page has to show what it should."""
WEIGHT: Final = 200_000
"""Bytes that a page may be, with all that comes with it."""
FIRST_PAINT: Final = 1_000
"""Milliseconds until there is something to see, over loopback."""

_EVENTS: Final = """
  window.seen = {paint: null, violations: []};
  new PerformanceObserver(list => {
    for (const each of list.getEntriesByName("first-contentful-paint")) seen.paint = each.startTime;
  }).observe({type: "paint", buffered: true});
  document.addEventListener("securitypolicyviolation", event => {
    seen.violations.push(`${event.effectiveDirective}: ${event.blockedURI} ${event.sourceFile}:${event.lineNumber} ${event.sample}`);
  });
"""
_WIDE: Final = """() => [...document.querySelectorAll("body *")]
  .filter(each => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .filter(each => { for (let up = each.parentElement; up; up = up.parentElement)
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(up).overflowX)) return false; return true; })
  .slice(0, 5).map(each => each.outerHTML.slice(0, 120))"""


@dataclass(frozen=True)
class Look:
    """How a reader looks at the dashboard."""

    name: str
    width: int
    height: int
    scheme: Literal["light", "dark"] = "light"
    motion: Literal["reduce", "no-preference"] = "no-preference"


WIDE: Final = Look("1440-light", 1440, 900)
WIDE_DARK: Final = Look("1440-dark", 1440, 900, "dark")
PHONE: Final = Look("390-light", 390, 844)
PHONE_DARK: Final = Look("390-dark", 390, 844, "dark")
STILL: Final = Look("1440-still", 1440, 900, motion="reduce")
LOOKS: Final = (WIDE, WIDE_DARK, PHONE, PHONE_DARK)


def chromium() -> Path:
    """The browser: SLUICEWAY_TEST_CHROMIUM if that is set, otherwise on PATH. Raises FileNotFoundError."""
    if chosen := os.environ.get("SLUICEWAY_TEST_CHROMIUM"):
        return Path(chosen)
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return Path(found)
    raise FileNotFoundError("no Chromium: `make e2e` installs one on Debian; elsewhere name yours in SLUICEWAY_TEST_CHROMIUM")


class Reader:
    """Somebody at a browser of their own. Whatever the browser complains of on their pages fails the test, at the block's end.

    `allow`: expressions for complaints that are a part of the test.
    """

    def __init__(self, browser: Browser, url: str, look: Look = WIDE, allow: tuple[str, ...] = ()) -> None:
        self.url, self.look = url, look
        self.complaints: list[str] = []
        self._allow = [re.compile(each) for each in allow]
        self._context = browser.new_context(
            viewport={"width": look.width, "height": look.height},
            color_scheme=look.scheme,
            reduced_motion=look.motion,
            base_url=url,
            locale="en-GB",
            timezone_id="UTC",
        )
        self._context.set_default_timeout(PATIENCE * 1000)
        self._context.add_init_script(_EVENTS)
        self._streams: dict[Page, list[str]] = {}
        self._weights: dict[Page, Weight] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self._context.close()

    def check(self) -> None:
        """Nothing was to be complained of up to now."""
        for page in self._streams:
            self.complaints += [f"forbidden by the page's policy: {each}" for each in page.evaluate("seen.violations.splice(0)")]
        bad = [each for each in self.complaints if not any(allowed.search(each) for allowed in self._allow)]
        assert not bad, "\n".join(bad)

    def page(self) -> Page:
        """An empty one."""
        page = self._context.new_page()
        self._streams[page] = []
        page.on("console", lambda said: self.complaints.append(f"console: {said.text}") if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(f"script: {error}"))
        page.on("request", lambda request: self._watch(request.url))
        page.on("response", lambda answer: self._streams[page].append(answer.url) if "/ui/live" in answer.url else None)
        self._weights[page] = Weight(self._context.new_cdp_session(page))
        return page

    def open(self, path: str, page: Page | None = None) -> Page:
        """A page that has all it begins with; if it goes on by itself, it has begun to."""
        page = page or self.page()
        self._streams[page].clear()
        answer = page.goto(path)
        assert answer is not None
        assert answer.status < 400, f"{path}: {answer.status}"
        self.follow(page)
        return page

    def follow(self, page: Page) -> None:
        """Returns when a page that goes on by itself has begun to."""
        if page.locator(r"#live[hx-sse\:connect]").count():
            _poll(page, lambda: bool(self._streams[page]), f"the stream of {page.url}")

    def weight(self, page: Page) -> int:
        """Bytes that have come for the page since it was empty, until nothing more came for a while.

        That is with what its stream says at first, if what the page shows has changed by then.
        """
        weight, before = self._weights[page], -1
        while weight.total != before:
            before = weight.total
            page.wait_for_timeout(400)
        return before

    def _watch(self, url: str) -> None:
        own, other = urlsplit(self.url), urlsplit(url)
        if other.scheme not in ("data", "blob") and (other.scheme, other.netloc) != (own.scheme, own.netloc):
            self.complaints.append(f"asked another server: {url}")


class Weight:
    """What a page has made the browser transfer: headers and bodies, packed as they were."""

    def __init__(self, session: CDPSession) -> None:
        self._of: dict[str, int] = {}
        session.on("Network.responseReceived", self._begin)
        session.on("Network.dataReceived", self._add)
        session.on("Network.loadingFinished", lambda event: self._of.update({event["requestId"]: int(event["encodedDataLength"])}))
        session.send("Network.enable")

    def _begin(self, event: dict[str, Any]) -> None:
        self._of[event["requestId"]] = int(event["response"]["encodedDataLength"])

    def _add(self, event: dict[str, Any]) -> None:
        self._of[event["requestId"]] = self._of.get(event["requestId"], 0) + int(event["encodedDataLength"])

    @property
    def total(self) -> int:
        return sum(self._of.values())


def first_paint(reader: Reader, path: str) -> float:
    """Milliseconds from the request to the first contents: the best of three, as others are at work on the machine, too."""
    best = float("inf")
    for _ in range(3):
        page = reader.open(path)
        page.wait_for_function("() => seen.paint !== null")
        best = min(best, float(page.evaluate("seen.paint")))
        if best < FIRST_PAINT:
            break
    return best


@cache
def _axe() -> str:
    return AXE.read_text()


def axe(page: Page) -> None:
    """WCAG 2.2 AA, as far as a program sees it. It is given to the page as its developer's tools would, so the page's policy stays."""
    page.evaluate(_axe())
    options = {"runOnly": {"type": "tag", "values": RULES}, "rules": {"target-size": {"enabled": True}}, "resultTypes": ["violations"]}
    found: dict[str, Any] = page.evaluate("options => axe.run(document, options)", options)
    told = [
        f"{each['id']} ({each['impact']}): {each['help']}\n"
        + "".join(f"    {node['html'][:160]}\n      {_indented(node['failureSummary'])}\n" for node in each["nodes"][:4])
        for each in found["violations"]
    ]
    assert not told, f"{page.url}\n" + "\n".join(told)


def _indented(text: str) -> str:
    return text.replace("\n", "\n      ")


def fits(page: Page) -> None:
    """Nothing has to be scrolled sideways but what does so by itself."""
    wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{page.url} is {wide} px too wide: {page.evaluate(_WIDE)}"


def is_shown(page: Page, selector: str, text: str | None = None) -> None:
    """Waits until there is such an element to see, with that text in it."""
    found = page.locator(selector)
    (found if text is None else found.filter(has_text=text)).first.wait_for(state="visible")


def changes(page: Page, selector: str, what: Callable[[str], bool]) -> str:
    """Waits until the text there is as it should be, without the page being loaded anew; the text."""
    page.evaluate("window.here = true")
    _poll(page, lambda: what(page.locator(selector).first.inner_text()), f"{selector} of {page.url}")
    assert page.evaluate("window.here === true"), f"{page.url} was loaded anew"
    return page.locator(selector).first.inner_text()


def _poll(page: Page, condition: Callable[[], bool], what: str) -> None:
    """As `wait_until`, but what the browser says is heard meanwhile."""
    waited = 0
    while not condition():
        assert waited < PATIENCE * 1000, f"{what} did not change within {PATIENCE} s"
        page.wait_for_timeout(50)
        waited += 50


@contextmanager
def started() -> Iterator[Browser]:
    """A browser without windows."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own box for its processes needs a user who is not root.
        browser = playwright.chromium.launch(executable_path=str(chromium()), chromium_sandbox=os.geteuid() != 0)
        try:
            yield browser
        finally:
            browser.close()
