"""Live reload of the configuration."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from sluiceway.adapters import system
from sluiceway.instance.configuration import Loaded
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import Actor
from sluiceway.model.configuration import Configuration
from sluiceway.server.tls import TlsFiles

log = logging.getLogger("sluiceway.server")

WATCH_INTERVAL: Millis = 1_000
"""Interval between two looks at the files. A changed file is read once two looks agree, when it is no longer being written."""
AGAIN = 30
"""Looks after which files that could not be applied, although nothing is wrong with them, are read again."""

ON_SIGNAL = Actor("SIGHUP")
ON_CHANGE = Actor("file watch")


class Failure(NamedTuple):
    """Failed reload: its time and error."""

    at: Millis
    detail: str


class Stillness:
    """Detects that files have changed and come to rest, from repeated looks at them."""

    def __init__(self, looks: object) -> None:
        self._known = self._last = looks

    def look(self, looks: object) -> bool:
        """Whether the files differ from the last reported state, and are the same as at the last look."""
        rests, self._last = looks == self._last, looks
        if not rests or looks == self._known:
            return False
        self._known = looks
        return True


class Reloader:
    """Reloads the configuration, on demand or when its files change, and applies it whole or not at all.

    `loaded`: the configuration in force, since `applied_at`; `last_error`: why a later one is not. `apply` takes over the sections that
    cannot fail.
    """

    def __init__(self, loaded: Loaded, service: Service, apply: Callable[[Configuration], None], tls: TlsFiles | None = None) -> None:
        self.loaded = loaded
        self.applied_at = system.now()
        self.last_error: Failure | None = None
        self._service = service
        self._apply = apply
        self._tls = tls
        self._reloading = asyncio.Lock()
        server = loaded.configuration.server
        self._tls_files = [Path(server.tls_certificate), Path(server.tls_key)] if tls is not None else []
        self._tls_content = _content(self._tls_files)
        self._files = [*([loaded.file] if loaded.file is not None else []), *self._tls_files]

    async def reload(self, by: Actor) -> list[str]:
        """Read, check, compare and apply the configuration, with an audit entry. Returns the names of the changed keys.

        Raises `invalid_request`, `restart_required`, `unavailable`, `outcome_unknown`; then nothing has changed, unless the error says so,
        and `last_error` says why.
        """
        async with self._reloading:
            try:
                changed = await self._reload(by)
            except SluicewayError as error:
                self.last_error = Failure(system.now(), error.detail)
                log.error("the configuration was not reloaded (%s): %s", by.name, error.detail)
                raise
            self.last_error = None
            return changed

    async def _reload(self, by: Actor) -> list[str]:
        loaded = self.loaded.again()
        old, new = self.loaded.configuration, loaded.configuration
        content = _content(self._tls_files)
        renewed = [] if content == self._tls_content else ["server.tls_certificate"]
        if renewed:
            # Tested in a separate context: from here on nothing may fail.
            TlsFiles(*self._tls_files)
        changed = await self._service.reconfigure(old, new, renewed, by)
        self.loaded = loaded
        if changed:
            self.applied_at = system.now()
            self._apply(new)
        if renewed and self._tls is not None:
            try:
                self._tls.reload()
                self._tls_content = content
            except SluicewayError as error:
                # The files changed again after the test, when the rest was in force. The next look at them finds and reports that.
                log.warning("keeping the current certificate: %s", error.detail)
        return changed

    async def reload_or_log(self, by: Actor) -> bool:
        """Reload, for callers without an answer: errors are in `last_error` and in the log. Returns whether to try the same files again."""
        try:
            await self.reload(by)
        except SluicewayError as error:
            return error.retryable
        except Exception:
            log.exception("the configuration was not reloaded (%s)", by.name)
        return False

    async def watch(self, watch_interval: Millis = WATCH_INTERVAL) -> None:
        """Reload whenever the content of the files changes, until cancelled.

        Content that is wrong is not tried again unchanged. What the meta store kept from being applied is: a renewed certificate may be the
        last change before the present one expires.
        """
        # No state is known at first: the files may have changed while the server started.
        stillness = Stillness(None)
        content: list[bytes | None] = []
        again_in = 0
        while True:
            await asyncio.sleep(watch_interval / 1_000)
            is_due, again_in = again_in == 1, max(0, again_in - 1)
            if stillness.look(_looks(self._files)) and (now := _content(self._files)) != content:
                content, is_due = now, True
            if is_due:
                again_in = AGAIN if await self.reload_or_log(ON_CHANGE) else 0


def _looks(files: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    """Cheap fingerprint of the files; None for a missing one."""
    found: list[tuple[int, int, int] | None] = []
    for path in files:
        try:
            known = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((known.st_mtime_ns, known.st_size, known.st_ino))
    return found


def _content(files: Sequence[Path]) -> list[bytes | None]:
    found: list[bytes | None] = []
    for path in files:
        try:
            found.append(hashlib.sha256(path.read_bytes()).digest())
        except OSError:
            found.append(None)
    return found
