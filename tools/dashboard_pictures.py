"""Take the pictures of the dashboard that the documents show, of a real server with the demo of `sluiceway dev`. Some two minutes.

Needs a Chromium, as `make e2e` does. The animation of the map begins before the first move and ends after it.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from PIL import Image
from playwright.sync_api import Browser, Page

from sluiceway.client import Client
from tests.e2e.harness import started

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
QUEUE = "demo-orders"
EVERY = 1.5
"""Seconds between two frames."""
LONGEST = 90
"""Frames."""
AFTER = 4
"""Frames once it is over."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sluiceway.cli.main", "dev", "--no-open", "--data", f"{folder}/data"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = next(found[0] for line in server.stdout if (found := re.search(r"http://[0-9.:]+", line)))
                with started() as browser:
                    pictures(browser, url)
                    schedules(browser, url)
            finally:
                server.terminate()


def pictures(browser: Browser, url: str) -> None:
    animation(page_of(browser, 1180, 720, "light"), f"{url}/ui/queues/{QUEUE}/map")
    for name, path, width, scheme in (
        ("overview", "/ui", 1440, "light"),
        ("queue", f"/ui/queues/{QUEUE}", 1440, "dark"),
        ("phone", f"/ui/queues/{QUEUE}/map", 390, "dark"),
    ):
        page = page_of(browser, width, 900, scheme)
        page.goto(url + path)
        page.wait_for_timeout(12_000)
        save(page, name)


def schedules(browser: Browser, url: str) -> None:
    """The list, once a minute has been fired."""
    with Client(url) as client:
        for name, cron, zone, fields in (
            ("close-day", "30 18 * * mon-fri", "Europe/Berlin", {}),
            ("invoices", "0 6 1 * *", "Europe/Berlin", {"jitter": "10m"}),
            ("poll-partners", "* * * * *", "UTC", {}),
            ("report-asia", "0 9 * * mon-fri", "Asia/Tokyo", {}),
            ("report-us", "0 9 * * mon-fri", "America/New_York", {"paused": True}),
        ):
            client.create_schedule(name, cron=cron, timezone=zone, queue_name=QUEUE, item={"job": name}, **fields)
        while client.get_schedule("poll-partners").last_fired is None:
            time.sleep(1)
    page = page_of(browser, 1440, 600, "light")
    page.goto(f"{url}/ui/schedules")
    page.wait_for_timeout(2_000)
    save(page, "schedules")


def save(page: Page, name: str) -> None:
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(IMAGES / f"dashboard-{name}.webp", quality=85, method=6)


def page_of(browser: Browser, width: int, height: int, scheme: str) -> Page:
    dark = scheme == "dark"
    return browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light").new_page()


def animation(page: Page, url: str) -> None:
    page.goto(url)
    frames: list[Image.Image] = []
    moving, after = False, 0
    while len(frames) < LONGEST and after < AFTER:
        time.sleep(EVERY)
        draining = page.locator("#live .state", has_text="running").count() > 0
        moving = moving or draining
        # Of the wait for the first move a few frames are enough.
        frames = frames if moving else frames[-3:]
        frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
        after += moving and not draining
    if not moving:
        raise SystemExit("nothing moved")
    frames[0].save(
        IMAGES / "dashboard-map.webp",
        save_all=True,
        append_images=frames[1:],
        duration=700,
        loop=0,
        quality=70,
        method=6,
        minimize_size=True,
    )
    print(f"{len(frames)} frames")


if __name__ == "__main__":
    main()
