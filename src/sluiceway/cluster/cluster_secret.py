"""The secret that authenticates the instances of a cluster to one another. Any reader of the meta store has it, and is trusted anyway."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from sluiceway.adapters.system import new_secret
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError

CLUSTER_SECRET: Final = "cluster/secret"
_PREFIX: Final = "slwc_"
_AGAIN: Final = 0.1
"""Seconds before the meta store is read again: it may read well, and fail at each commit."""


async def secret_of(meta: MetaStore) -> str:
    """Return the cluster's secret. The first instance to ask creates it; of several at once one does, and all get the same.

    Raises StoreUnavailableError.
    """
    while True:
        found = (await meta.read([CLUSTER_SECRET])).entries.get(CLUSTER_SECRET)
        if found is not None:
            return found.value.decode()
        # The next read shows the outcome.
        with contextlib.suppress(ConflictError, MetaUnknownError):
            await meta.commit(checks={CLUSTER_SECRET: None}, puts={CLUSTER_SECRET: f"{_PREFIX}{new_secret()}".encode()})
            continue
        await asyncio.sleep(_AGAIN)
