"""HTML by templates, in which every text is escaped unless the template itself has it."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any, Final

import jinja2
from markupsafe import Markup

_HERE: Final = files("sluiceway.server.ui")
_TYPES: Final = {
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "txt": b"text/plain; charset=utf-8",
}
_ASSETS: Final = {
    "ui.css": "assets/ui.css",
    "ui.js": "assets/ui.js",
    "charts.js": "assets/charts.js",
    "map.js": "assets/map.js",
    "redrive.js": "assets/redrive.js",
    "icon.svg": "assets/icon.svg",
    "htmx.js": "assets/vendor/htmx/htmx.min.js",
    "sse.js": "assets/vendor/htmx/hx-sse.min.js",
    "uplot.js": "assets/vendor/uplot/uPlot.iife.min.js",
    "uplot.css": "assets/vendor/uplot/uPlot.min.css",
}


class Asset:
    """A file that a page refers to. Its address has a hash of its text, so a browser may keep it for good."""

    def __init__(self, name: str, body: bytes) -> None:
        stem, _, self.kind = name.rpartition(".")
        self.body = body
        self.packed = gzip.compress(body, mtime=0)
        self.path = f"/ui/assets/{stem}-{hashlib.sha256(body).hexdigest()[:12]}.{self.kind}"

    @property
    def content_type(self) -> bytes:
        return _TYPES[self.kind]


@cache
def assets() -> Mapping[str, Asset]:
    """By the names that templates know. Raises FileNotFoundError where those of others were not fetched when this was built."""
    return {name: Asset(name, _HERE.joinpath(path).read_bytes()) for name, path in _ASSETS.items()}


class Pages:
    """The templates."""

    def __init__(self) -> None:
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("sluiceway.server.ui"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(
            number=number,
            rate=rate,
            duration=duration,
            bytes=size,
            time=time,
            island=island,
            pattern=pattern,
            moment=moment,
            setting=setting,
        )
        self._templates.globals.update(asset=lambda name: assets()[name].path)

    def html(self, template: str, facts: Mapping[str, Any]) -> Markup:
        """The template's text; it may be put into another one."""
        return Markup(self._templates.get_template(template).render(facts))


def number(value: float | None) -> str:
    """1,234; a dash for what is not known."""
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def rate(value: float | None) -> str:
    """Items a second, with as many digits as one can read."""
    if value is None:
        return "–"
    return f"{value:,.0f}/s" if value >= 10 or value == 0 else f"{value:,.1f}/s"


def size(value: float) -> str:
    """1,536 is `1.5 KiB`."""
    if value < 1024:
        return f"{value:,.0f} B"
    units = iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    value /= 1024
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:,.1f} {unit}"


def duration(seconds: float | None) -> str:
    """About so long, in two units at most."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    whole = int(seconds)
    parts = [(whole // 86_400, "d"), (whole // 3_600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    there = [place for place, (count, _) in enumerate(parts) if count]
    return " ".join(f"{count} {unit}" for count, unit in parts[there[0] : there[0] + 2] if count)


def time(text: str | None) -> Markup | str:
    """A moment as the API has it, in UTC; a script says it in the reader's own time."""
    if not text:
        return "–"
    try:
        at = datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return text
    return Markup('<time datetime="{}">{}</time>').format(text, at.strftime("%Y-%m-%d %H:%M:%S UTC"))


def moment(seconds: int) -> Markup | str:
    """As `time`, of seconds since the epoch."""
    return time(datetime.fromtimestamp(seconds, UTC).isoformat())


def setting(value: object) -> str:
    """A value of the API as a text that says its kind, too: nothing at all is `none`, an empty text is `""`."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, ensure_ascii=False)


def island(value: object) -> Markup:
    """JSON to stand in a `<script type="application/json">`, from which nothing in it can break out."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def pattern(text: str) -> str:
    """The text as one that a form's `pattern` takes alone."""
    return "".join(f"\\{each}" if not each.isalnum() and each not in "_-" else each for each in text)
