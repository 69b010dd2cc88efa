"""The two clients with one face, so that one test runs on both."""

from __future__ import annotations

import asyncio
from typing import Any

from sluiceway.client import AsyncClient


class Blocking:
    """The asyncio client with the blocking one's face."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **options: self._runner.run(method(*args, **options))

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()
