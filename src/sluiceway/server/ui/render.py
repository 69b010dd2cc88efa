"""HTML from templates. Every value is escaped."""

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
    """A static file. Its path contains a hash of its content, so browsers may cache it for ever."""

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
    """The assets by template name. Raises FileNotFoundError where the build did not fetch third-party files."""
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
        """The rendered template, safe to embed in another one."""
        return Markup(self._templates.get_template(template).render(facts))


def number(value: float | None) -> str:
    """`1,234`; a dash for an unknown value."""
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def rate(value: float | None) -> str:
    """Items per second, rounded for display."""
    if value is None:
        return "–"
    return f"{value:,.0f}/s" if value >= 10 or value == 0 else f"{value:,.1f}/s"


def size(value: float) -> str:
    """A size in bytes with its unit: 1,536 is `1.5 KiB`."""
    if value < 1024:
        return f"{value:,.0f} B"
    units = iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    value /= 1024
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:,.1f} {unit}"


def duration(seconds: float | None) -> str:
    """A duration in at most two units, such as `1 h 20 min`."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    whole = int(seconds)
    parts = [(whole // 86_400, "d"), (whole // 3_600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    there = [place for place, (count, _) in enumerate(parts) if count]
    return " ".join(f"{count} {unit}" for count, unit in parts[there[0] : there[0] + 2] if count)


def time(text: str | None) -> Markup | str:
    """A timestamp of the API, in UTC; a script converts it to the reader's time zone."""
    if not text:
        return "–"
    try:
        at = datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return text
    return Markup('<time datetime="{}">{}</time>').format(text, at.strftime("%Y-%m-%d %H:%M:%S UTC"))


def moment(seconds: int) -> Markup | str:
    """As `time`, from seconds since the epoch."""
    return time(datetime.fromtimestamp(seconds, UTC).isoformat())


def setting(value: object) -> str:
    """A value of the API as text: null is `none`, an empty string is `""`."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, ensure_ascii=False)


def island(value: object) -> Markup:
    """JSON for a `<script type="application/json">`, escaped so that it cannot close the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def pattern(text: str) -> str:
    """The text escaped for the `pattern` attribute of an input."""
    return "".join(f"\\{each}" if not each.isalnum() and each not in "_-" else each for each in text)
