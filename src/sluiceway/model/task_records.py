"""Records of capture tasks: partitions of a change stream, positions in them, and the election's result."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pyarrow as pa

from sluiceway.kernel.clock import Millis

CHANGES = pa.schema(
    [
        pa.field("position", pa.utf8(), nullable=False),
        pa.field("at", pa.timestamp("ms", "UTC")),
        pa.field("kind", pa.utf8()),
        pa.field("key", pa.utf8()),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)
"""Schema of a change stream's records. `position`: the record's own, for people and logs; it need not be one to read from. `at`: time of
writing. `key`: the subject; `kind`: the kind of change, such as `insert`. `payload`: the stream's own format."""


class AnnouncedPartition(msgspec.Struct, frozen=True, array_like=True):
    """A partition as the stream announces it.

    `parents`: all of them, constant, and equal in the announcements by each of them. `start`: opaque position where reading begins.
    `since`, for seeds: no record of it is older.
    """

    token: str
    parents: tuple[str, ...] = ()
    start: str = ""
    since: Millis = 0


class Group(NamedTuple):
    """Result of the election: the leader and the members. `generation` rises with each change, unless the election has lost its memory.

    `leader` is empty for a member that has lost its place in the election: it cannot know of a leader.
    """

    generation: int
    leader: str
    members: tuple[str, ...]


class DeadLetters(msgspec.Struct, frozen=True):
    """Records that the target refused and that went to the dead queue `queue` instead: their number, and the last one's position and
    time."""

    count: int
    queue: str
    position: str
    at: Millis


class PositionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a partition in a position store, beside the fence.

    `position`: every record up to it has been handed on; None: none yet. `plan`: end of the batch being handed on, now or when its last
    owner stopped; the next owner first hands on exactly that batch, from `position` to `plan`, as number `batch`. None: no such batch.
    `batch`: number of the last planned batch; rises by one each time. `at`: no record after `position` is older. `behind`: last known lag
    of `position` behind the end of the stream. `records`: number handed on. `dead`: those of them that became dead letters; None: none.
    """

    position: str | None = None
    plan: str | None = None
    batch: int = 0
    at: Millis | None = None
    behind: Millis | None = None
    records: int = 0
    dead: DeadLetters | None = None
