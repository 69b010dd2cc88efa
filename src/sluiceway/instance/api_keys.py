"""API keys: creation, revocation and lookup. Every instance refuses a revoked key."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from sluiceway.adapters import system
from sluiceway.adapters.background import shielded
from sluiceway.adapters.disk import keep_private
from sluiceway.adapters.lock import has_been_used
from sluiceway.adapters.meta.opening import open_meta_store
from sluiceway.instance.adoption_mark import check_not_adopted
from sluiceway.kernel.clock import Millis, format_time
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_API_KEYS
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.model.access import Actor, ApiKey, Caller, KeySpec, decode_key, encode_key
from sluiceway.ports.meta_store import ConflictError, Entry, MetaStore, MetaUnknownError, View
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

API_KEY: Final = "apikey/"
_PREFIX: Final = "slw"
_NOBODYS: Final = bytes(32)
"""Digest of no secret. A request without a known key is compared with it, so that it takes as long."""


@contextlib.asynccontextmanager
async def keys_of(data: Path, meta_url: str = "") -> AsyncIterator[ApiKeys]:
    """API keys of a data directory, to create, list and revoke, whether or not a server runs on it. With `meta_url`, of the cluster whose
    meta store that is.

    Raises `invalid_request` if a server has used the directory and would not see these keys, or if a cluster has adopted it,
    StoreUnavailableError, OSError.
    """
    keep_private(data)
    own = data / "meta.sqlite"
    if not meta_url and has_been_used(data) and not own.exists():
        raise invalid(
            "data",
            f"the server that uses {data} keeps its API keys elsewhere. If it is in a cluster, pass the --config or --cluster-meta of its "
            "`serve`; if it has memory backends, set server.admin_key in its configuration",
        )
    meta = open_meta_store(meta_url or f"sqlite:{own}")
    audit = AuditTrail(meta)
    try:
        await check_not_adopted(meta, data)
        yield ApiKeys(meta, audit)
    finally:
        await audit.close()
        await meta.close()


class CreatedKey(NamedTuple):
    """A new key. `text` is what the client sends; it is stored nowhere and cannot be shown again."""

    key: ApiKey
    text: str

    def __repr__(self) -> str:
        return f"CreatedKey({self.key!r}, text=…)"


class Holder(NamedTuple):
    """A key, with its owner as a caller."""

    key: ApiKey
    caller: Caller


class ApiKeys:
    """API keys of one meta store, shared by any number of processes.

    Changes by this process apply here at once, those of others within `poll_interval` plus the time of a read. While the meta store cannot
    be read, the known keys stay valid: a server that has lost it goes on serving. Call `start` before `find`, and `stop` at the end.
    """

    def __init__(self, meta: MetaStore, audit: AuditTrail, *, poll_interval: Millis = 400, look_interval: Millis = 100) -> None:
        self._meta = meta
        self._audit = audit
        self._poll_interval = poll_interval
        self._look_interval = look_interval
        self._entries: dict[str, Entry] = {}
        self._holders: dict[str, Holder] = {}
        self._stamp = -1
        self._look: asyncio.Task[bool] | None = None
        self._poll: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the keys, and begin to poll for changes. Raises StoreUnavailableError."""
        await self._read()
        self._poll = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        for task in (self._poll, self._look):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    # ---- lookup -----------------------------------------------------------------------------------------------

    async def find(self, text: str) -> Holder | None:
        """Return the holder of a key; None for an unknown, expired or revoked one. Raises `unavailable` for an unknown id while the meta
        store cannot be read: the key may be a new one, and who is told that it is none gives up.

        Reads the meta store before it rejects a key, which another process may just have created. Calls within the same `look_interval`
        share one read, so a flood of wrong keys costs ten reads a second, no memory, and its senders a wait.
        """
        prefix, _, rest = text.partition("_")
        key_id, _, secret = rest.partition("_")
        digest = _digest(secret)
        holder = self._match(key_id, digest)
        if holder is None and prefix == _PREFIX:
            has_looked = await self._look_again()
            holder = self._match(key_id, digest)
            if holder is None and not has_looked and key_id not in self._holders:
                raise SluicewayError("unavailable", "the meta store, which has the API keys, does not answer; try again")
        return holder if prefix == _PREFIX else None

    def known(self, key_id: str) -> Holder | None:
        """Return the holder of a key that was accepted before, if the key is still valid."""
        holder = self._holders.get(key_id)
        return None if holder is None or _expired(holder.key) else holder

    def _match(self, key_id: str, digest: bytes) -> Holder | None:
        holder = self.known(key_id)
        # A fast hash is enough, because the secret is random and too long to be guessed (ADR 15).
        same = hmac.compare_digest(digest, _NOBODYS if holder is None else holder.key.digest)
        return holder if same else None

    async def _look_again(self) -> bool:
        """Wait for a read of the meta store that begins after this call. Returns whether it could be read."""
        if self._look is None:
            self._look = asyncio.create_task(self._read_soon())
        return await shielded(self._look)

    async def _read_soon(self) -> bool:
        await asyncio.sleep(self._look_interval / 1_000)
        self._look = None
        try:
            await self._read()
        except StoreUnavailableError:
            return False
        return True

    async def _follow(self) -> None:
        """Poll the keys. The store's hints may be late, so polls are needed anyway."""
        failing = False
        while True:
            await asyncio.sleep(self._poll_interval / 1_000)
            try:
                await self._read()
                failing = False
            except Exception as error:
                # Whatever it is: without polls, revoked keys would be good until a restart.
                if not failing:
                    about = None if isinstance(error, StoreUnavailableError) else error
                    log.error("API keys created or revoked by other processes are not seen: %s", error, exc_info=about)
                failing = True

    async def _read(self) -> View:
        view = await self._meta.read(prefixes=[API_KEY])
        # Two reads may complete out of order.
        if view.stamp >= self._stamp:
            self._stamp = view.stamp
            self._show(view.prefix(API_KEY))
        return view

    def _show(self, entries: dict[str, Entry]) -> None:
        if entries == self._entries:
            return
        self._entries = entries
        self._holders = {key.key_id: Holder(key, key.caller()) for key in _readable(entries)}

    # ---- changes ----------------------------------------------------------------------------------------------

    async def create(self, spec: KeySpec, by: Actor) -> CreatedKey:
        """Record a new key, audited in the same commit. Needs no `start`. Raises `invalid_request`, `unavailable`, `outcome_unknown`."""
        now = system.now()
        spec = spec.checked(now)
        secret = system.new_secret()
        while True:
            view = await self._view()
            if len(view.entries) >= MAX_API_KEYS:
                raise SluicewayError("invalid_request", f"there are {MAX_API_KEYS:,} API keys, which is the maximum; revoke some first")
            key = ApiKey(
                system.new_incarnation(),
                spec.name,
                tuple(spec.scopes),
                _digest(secret),
                now,
                spec.expires_at,
                spec.requests_per_second,
                spec.bytes_per_second,
            )
            where = API_KEY + key.key_id
            detail = {
                "key_id": key.key_id,
                "name": key.name,
                "scopes": key.scopes,
                "expires_at": key.expires_at and format_time(key.expires_at),
            }
            entry, note = self._audit.entry("keys.create", by, detail=detail)
            # Otherwise two concurrent creations could pass the limit together.
            if await self._commit({where: None}, {API_KEY: view.stamp}, {where: encode_key(key), entry: note}, ()):
                log.info("API key %s (%s) created by %s", key.key_id, key.name, by.name)
                return CreatedKey(key, f"{_PREFIX}_{key.key_id}_{secret}")

    async def revoke(self, key_id: str, by: Actor) -> None:
        """Remove a key, audited in the same commit. Needs no `start`. Raises `key_not_found`, `unavailable`, `outcome_unknown`."""
        where = API_KEY + key_id
        while True:
            found = (await self._view()).entries.get(where)
            if found is None:
                raise SluicewayError("key_not_found", f"there is no API key {key_id[:64]!r}; list the keys with keys.list", "key_id")
            names = [key.name for key in _readable({where: found})]
            entry, note = self._audit.entry("keys.revoke", by, detail={"key_id": key_id, "name": "".join(names)})
            if await self._commit({where: found.stamp}, {}, {entry: note}, (where,)):
                log.info("API key %s revoked by %s", key_id, by.name)
                return

    async def list(self) -> list[ApiKey]:
        """List all keys by id, including expired ones. Needs no `start`. Raises `unavailable`."""
        return _readable((await self._view()).prefix(API_KEY))

    async def _view(self) -> View:
        try:
            return await self._read()
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error

    async def _commit(
        self, checks: dict[str, int | None], unchanged: dict[str, int], puts: dict[str, bytes], deletes: tuple[str, ...]
    ) -> bool:
        """Commit. Returns False after a conflict with another change. Raises `outcome_unknown`."""
        try:
            await self._meta.commit(checks, unchanged, puts, deletes)
        except ConflictError:
            return False
        except MetaUnknownError as error:
            detail = f"the meta store did not confirm the change: {error}; keys.list shows it"
            raise SluicewayError("outcome_unknown", detail) from error
        # The commit is done; if this read fails, the next poll shows it.
        with contextlib.suppress(StoreUnavailableError):
            await self._read()
        return True


def _readable(entries: dict[str, Entry]) -> list[ApiKey]:
    """Decode the keys, skipping unreadable ones: they must not lock out the others."""
    keys = []
    for where, entry in entries.items():
        try:
            keys.append(decode_key(entry.value))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("the meta store's %s is not an API key: %s", where, error)
    return keys


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _expired(key: ApiKey) -> bool:
    return key.expires_at is not None and key.expires_at <= system.now()
