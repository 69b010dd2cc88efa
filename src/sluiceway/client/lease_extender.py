"""Keeps leases alive from a thread of its own, for blocking code that holds items for longer than their leases last."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sluiceway.client.consumer_common import MIN_LEASE_TIMEOUT
from sluiceway.client.lease_manager import refused
from sluiceway.client.protocol import Duration, duration_text, millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_JSON, MAX_LEASE_TIMEOUT

if TYPE_CHECKING:
    from sluiceway.client._sync.client import Client

log = logging.getLogger("sluiceway.client")

_CALL_TIMEOUT = "10s"
_AGAIN = 1.0
"""Seconds before leases that could not be extended are tried again: part of their time is gone already."""


class LeaseExtender:
    """Extends leases of one queue to `lease_timeout` from now, each third of it, until they have ended, are dropped, or `close` is called.

    A lease may run out if the server cannot be reached for longer than that. The log then says so, since its items are served again.
    Raises `invalid_request` for a `lease_timeout` of less than 300 ms or more than 30 days. For any thread.
    """

    def __init__(self, client: Client, queue_name: str, lease_timeout: Duration) -> None:
        found = millis(lease_timeout, "lease_timeout")
        if not MIN_LEASE_TIMEOUT <= found <= MAX_LEASE_TIMEOUT:
            raise invalid("lease_timeout", f"expected {MIN_LEASE_TIMEOUT}ms to {MAX_LEASE_TIMEOUT // 86_400_000}d")
        self._client, self._queue_name, self._lease_timeout = client, queue_name, duration_text(lease_timeout)
        self._pause = found / 3000
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lease_ids: dict[str, None] = {}

    def add(self, lease_ids: Iterable[str]) -> None:
        """Keep these leases, which were just taken or extended."""
        with self._lock:
            self._lease_ids |= dict.fromkeys(lease_ids)
            if self._thread is None and self._lease_ids:
                self._thread = threading.Thread(target=self._run, name="sluiceway-lease-extender", daemon=True)
                self._thread.start()

    def drop(self, lease_ids: Iterable[str]) -> None:
        """Keep these leases no longer."""
        with self._lock:
            for lease_id in lease_ids:
                self._lease_ids.pop(lease_id, None)

    def close(self) -> None:
        """Keep nothing any more. A call that is under way may still extend leases."""
        self._closed.set()

    def _run(self) -> None:
        pause = self._pause
        while not self._closed.wait(pause):
            with self._lock:
                held = list(self._lease_ids)
            done = [self._extend(held[start : start + MAX_ITEMS_JSON]) for start in range(0, len(held), MAX_ITEMS_JSON)]
            pause = self._pause if all(done) else min(self._pause, _AGAIN)

    def _extend(self, lease_ids: list[str]) -> bool:
        """Extend leases. False: it failed, and may succeed soon."""
        name = self._queue_name
        try:
            answer = self._client.extend(name, lease_ids, lease_timeout=self._lease_timeout, request_timeout=_CALL_TIMEOUT)
        except SluicewayError as error:
            if not self._closed.is_set():
                log.warning("queue %s: %d leases were not extended: %s. They are tried again", name, len(lease_ids), error)
            return not error.retryable
        except Exception:
            # This thread keeps all leases, and nobody would see it end.
            log.exception("queue %s: %d leases were not extended. They are tried again", name, len(lease_ids))
            return False
        with self._lock:
            gone = [each for each in answer.ignored if each.id in self._lease_ids]
        self.drop(each.id for each in gone)
        for each in refused(gone):
            if not self._closed.is_set():
                log.warning("queue %s: lease %s has ended (%s): its items are served again", name, each.id, each.reason)
        return True
