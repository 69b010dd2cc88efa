"""Mark of an adoption in the directory's own meta store: whether a cluster has, or may have, the directory's queues."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from sluiceway.kernel.clock import Millis, format_time
from sluiceway.kernel.errors import invalid
from sluiceway.ports.meta_store import MetaStore

MARK: Final = "adoption"


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of the adoption with that `id`. From `publishing` on, no server may use the directory: the cluster may serve its queues.

    `cluster`: URL of the cluster's meta store, without secrets. `placement`: the backend of each partition there, by `item_of`.
    """

    id: str
    state: Literal["copying", "publishing", "done"] = "copying"
    cluster: str = ""
    at: Millis = 0
    placement: dict[str, str] = {}


async def read_mark(meta: MetaStore) -> Mark | None:
    """The mark; None: no adoption has begun. Raises StoreUnavailableError."""
    entry = (await meta.read([MARK])).entries.get(MARK)
    return None if entry is None else msgspec.json.decode(entry.value, type=Mark)


async def put_mark(meta: MetaStore, mark: Mark) -> None:
    """Replace the mark. Raises MetaUnknownError."""
    await meta.commit(puts={MARK: msgspec.json.encode(mark)})


async def check_not_adopted(meta: MetaStore, data: Path) -> None:
    """Raise `invalid_request` if a cluster has, or may have, the queues of that directory, whose meta store this is."""
    mark = await read_mark(meta)
    if mark is None or mark.state == "copying":
        return
    where = f"the cluster with the meta store {mark.cluster}"
    if mark.state == "done":
        raise invalid(
            "data", f"the queues of {data} are in {where} since {format_time(mark.at)}; start an instance of it: pass --config to `serve`"
        )
    raise invalid(
        "data",
        f"the queues of {data} may be in {where}: their adoption was interrupted at {format_time(mark.at)}; run "
        f"`sluiceway cluster adopt {data}` with the cluster's --config again",
    )
