"""`sluiceway backend accept`: writes to the meta store directly, because the server may not serve the storage in question."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sluiceway.adapters.meta.opening import open_meta_store
from sluiceway.instance.configuration import load
from sluiceway.instance.storage_acceptance import accept
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.model.access import Actor
from sluiceway.ports.meta_store import ConflictError, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError


def accept_storage(
    data: Path, config: Path | None, cluster_meta: str | None, backend: str, queue_name: str | None, numbers: Sequence[int]
) -> list[tuple[str, int]]:
    """Run `accept` in the meta store of the folder or of the configured cluster. Raises as `accept` does, and `unavailable`."""
    cluster = load(config, flags={} if cluster_meta is None else {"cluster.meta": cluster_meta}).configuration.cluster
    own = data / "meta.sqlite"
    if not cluster.meta and not own.exists():
        raise invalid("data", f"there is no {own}; for a server in a cluster, pass --config or --cluster-meta")
    try:
        return asyncio.run(_accept(cluster.meta or f"sqlite:{own}", backend, queue_name, numbers))
    except ConflictError as error:
        raise SluicewayError("unavailable", f"an instance is opening one of the partitions; try again: {error}", "backend") from error
    except (StoreUnavailableError, MetaUnknownError) as error:
        raise SluicewayError("unavailable", str(error), "cluster.meta" if cluster.meta else "data") from error


async def _accept(meta_url: str, backend: str, queue_name: str | None, numbers: Sequence[int]) -> list[tuple[str, int]]:
    meta = open_meta_store(meta_url)
    audit = AuditTrail(meta)
    try:
        return await accept(meta, audit, backend, queue_name, numbers, Actor("command line"))
    finally:
        await audit.close()
        await meta.close()
