"""Creation of the first API key, directly in the server's storage. Write access to the storage is the authorisation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from sluiceway.adapters.system import now
from sluiceway.contract.key_answers import CreatedKey
from sluiceway.instance import api_keys
from sluiceway.instance.configuration import load
from sluiceway.kernel.clock import Millis, parse_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import Actor, KeySpec
from sluiceway.ports.partition_store import StoreUnavailableError


def create_key(
    data: Path,
    config: Path | None,
    cluster_meta: str | None,
    name: str,
    scopes: Sequence[str],
    expires_after: str | None,
    requests_per_second: int | None,
    bytes_per_second: int | None,
) -> CreatedKey:
    """Create a key in the meta store of the folder or of the configured cluster. A server may be running on it.

    Raises as `ApiKeys.create` and `load` do, and `unavailable`.
    """
    cluster = load(config, flags={} if cluster_meta is None else {"cluster.meta": cluster_meta}).configuration.cluster
    expires_at = None if expires_after is None else now() + parse_duration(expires_after, "expires_after")
    spec = KeySpec(name, scopes, expires_at, requests_per_second, bytes_per_second)
    try:
        made, text = asyncio.run(_create(data, cluster.meta, spec))
    except StoreUnavailableError as error:
        raise SluicewayError("unavailable", str(error), "cluster.meta" if cluster.meta else "data") from error
    return CreatedKey(
        key_id=made.key_id,
        name=made.name,
        scopes=list(made.scopes),
        created_at=_moment(made.created_at),
        expires_at=None if made.expires_at is None else _moment(made.expires_at),
        requests_per_second=made.requests_per_second,
        bytes_per_second=made.bytes_per_second,
        key=text,
    )


async def _create(data: Path, meta_url: str, spec: KeySpec) -> api_keys.CreatedKey:
    async with api_keys.keys_of(data, meta_url) as keys:
        return await keys.create(spec, Actor("command line"))


def _moment(at: Millis) -> datetime:
    return datetime.fromtimestamp(at / 1_000, UTC)
