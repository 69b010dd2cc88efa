"""Writes docs/reference/openapi.json, as a server serves it at /openapi.json: `python tools/docs_openapi.py`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from sluiceway.instance.configuration import load
from sluiceway.instance.service import Service
from sluiceway.server.openapi import as_text, describe
from sluiceway.server.wiring import Assembly, Door

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "openapi.json"


async def _document(data: Path) -> dict[str, Any]:
    service = Service(data)
    await service.start()
    try:
        app = Assembly(service, load(environment={}), Door(keys=True)).app
        return describe(app.endpoints, app.pages)
    finally:
        await service.stop()


def render() -> bytes:
    """The document as it should be."""
    with tempfile.TemporaryDirectory() as name:
        return as_text(asyncio.run(_document(Path(name))))


if __name__ == "__main__":
    TARGET.write_bytes(render())
