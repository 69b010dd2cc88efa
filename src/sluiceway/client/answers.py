"""What the server answers, as Python sees it. Times are `datetime` in UTC; a field that the client does not know is passed over."""

from __future__ import annotations

from datetime import datetime

import msgspec

from sluiceway.contract.item_answers import (
    Browsed as Browsed,
)
from sluiceway.contract.item_answers import (
    BrowsedItem as BrowsedItem,
)
from sluiceway.contract.item_answers import (
    Cleared as Cleared,
)
from sluiceway.contract.item_answers import (
    Completed as Completed,
)
from sluiceway.contract.item_answers import (
    Deleted as Deleted,
)
from sluiceway.contract.item_answers import (
    Explanation as Explanation,
)
from sluiceway.contract.item_answers import (
    Extended as Extended,
)
from sluiceway.contract.item_answers import (
    Ignored as Ignored,
)
from sluiceway.contract.item_answers import (
    Lease as Lease,
)
from sluiceway.contract.item_answers import (
    Leased as Leased,
)
from sluiceway.contract.item_answers import (
    LeasedItem as LeasedItem,
)
from sluiceway.contract.item_answers import (
    Left as Left,
)
from sluiceway.contract.item_answers import (
    PartitionExplanation as PartitionExplanation,
)
from sluiceway.contract.item_answers import (
    Peeked as Peeked,
)
from sluiceway.contract.item_answers import (
    Produced as Produced,
)
from sluiceway.contract.item_answers import (
    Redriven as Redriven,
)
from sluiceway.contract.item_answers import (
    Released as Released,
)
from sluiceway.contract.item_answers import (
    Retried as Retried,
)
from sluiceway.contract.item_answers import (
    Staged as Staged,
)
from sluiceway.contract.queue_settings import Backoff as Backoff
from sluiceway.contract.queue_settings import Partition as Partition
from sluiceway.contract.queue_settings import QueueInfo as QueueInfo
from sluiceway.contract.queue_settings import QueuePage as QueuePage
from sluiceway.contract.queue_stats import LogicalQueueStats as LogicalQueueStats
from sluiceway.contract.queue_stats import PartitionStats as PartitionStats
from sluiceway.contract.queue_stats import QueueStats as QueueStats

# -- the instances of a cluster ---------------------------------------------------------------------------------------


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance, as the one that answers (`here`) sees it. `state` is alive, silent, leaving or joining.

    `silent_for` (such as `300ms`) is how long it was not heard of; `partitions` counts those of all queues that are given to it.
    """

    instance: str
    address: str | None = None
    here: bool = False
    state: str = "alive"
    silent_for: str = "0s"
    joined_at: datetime | None = None
    partitions: int = 0


class LastRound(msgspec.Struct, frozen=True, kw_only=True):
    """The last round. Until it is `sealed`, the plan is that of the one before."""

    number: int
    sealed: bool
    trigger: str
    participants: list[str] = []
    moved: int = 0
    kept: int = 0


class InstanceList(msgspec.Struct, frozen=True, kw_only=True):
    """The instances by name, and how they divide the partitions. A server that is alone has no `parameters` and no `round`."""

    items: list[Instance]
    strategy: str
    era: int
    parameters: dict[str, str] | None = None
    round: LastRound | None = None


class MovedPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition that a round gave to another instance. `queue_name` None: deleted since. `before` None: nobody had it."""

    queue_name: str | None
    partition: int
    before: str | None
    owner: str


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A round that is over. `moved` partitions have another instance since, and `moves` has which, of thousands not all of them.

    `duration` is a text such as `250ms`.
    """

    number: int
    trigger: str
    participants: list[str]
    moved: int
    kept: int
    duration: str
    sealed_at: datetime
    sealed_by: str
    moves: list[MovedPartition] = []


class RoundList(msgspec.Struct, frozen=True, kw_only=True):
    items: list[Round]


# -- for whoever runs a server ----------------------------------------------------------------------------------------


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An API key without its secret. `expires_at` None: never. A rate of 0: no limit; None: as the server's configuration says."""

    key_id: str
    name: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None = None
    requests_per_second: int | None = None
    bytes_per_second: int | None = None


class CreatedKey(KeyInfo, frozen=True, kw_only=True):
    """A new key. `key` is what a client sends; the server does not keep it, so it cannot be shown again."""

    key: str

    def __repr__(self) -> str:
        return f"CreatedKey(key_id={self.key_id!r}, name={self.name!r}, scopes={self.scopes!r}, key=…)"


class OwnKey(msgspec.Struct, frozen=True, kw_only=True):
    """Whom the server takes this client for. `key_id` None: for whoever has the key of its configuration, or for anybody."""

    key_id: str | None
    name: str
    scopes: list[str]
    created_at: datetime | None = None
    expires_at: datetime | None = None
    requests_per_second: int | None = None
    bytes_per_second: int | None = None


class KeyPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some keys; `next` is the pivot of the next page, None on the last."""

    items: list[KeyInfo]
    next: str | None = None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who changed what, and when. `detail` depends on the `action`."""

    id: str
    at: datetime
    actor: str
    action: str
    queue_name: str | None = None
    request_id: str | None = None
    detail: object = None


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some entries, newest first; `next` is the pivot of the next, older page, None on the last."""

    items: list[AuditEntry]
    next: str | None = None


class Reloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration keys that have changed."""

    changed: list[str] = []


class BackendPage(msgspec.Struct, frozen=True, kw_only=True):
    """The backends, as the server describes them."""

    items: list[dict[str, object]]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened on the server. `type` is one of those in docs/api.md, `data` what belongs to it.

    The type `reset` means that events were missed: read again what you follow.
    """

    id: str | None
    type: str
    data: object
