"""What tasks divide, and what they are told of it: partitions of a change stream, positions in them, and who leads."""

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
"""A record of a change stream. `position` is its own, for people and logs: it need not be one that can be read from. `at`: when it was
written. `key`: what it is about; `kind`: what happened to that, such as `insert`. The payload is the stream's own."""


class Born(msgspec.Struct, frozen=True, array_like=True):
    """A partition as the stream tells of it.

    `parents` is all of them, always the same and told the same by each of them; `start` is where reading begins, opaque. `since`, for
    seeds: no record of it is older.
    """

    token: str
    parents: tuple[str, ...] = ()
    start: str = ""
    since: Millis = 0


class Group(NamedTuple):
    """What the election says: who leads whom. `generation` rises with each change, unless the election has lost its memory.

    Nobody leads, as far as a member can know, when it has lost its place in the election: then its `leader` is empty.
    """

    generation: int
    leader: str
    members: tuple[str, ...]


class DeadLetters(msgspec.Struct, frozen=True):
    """Records that the target does not take, and that went to the dead queue `queue` instead: `count` of them, the last, which was at
    `position`, at `at`.
    """

    count: int
    queue: str
    position: str
    at: Millis


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What a position store keeps of a partition, beside the fence.

    `position`: up to there every record has been handed on; None: none was yet. `plan`: the end of the batch that is being handed on, or
    was when its owner went; whoever goes on hands on exactly that first, from `position` to `plan`, as batch number `batch`. None: there
    is none. `batch` is the number of the last batch that was planned; it rises by one each time. `at`: no record after `position` is older.
    `behind`: by how long `position` was behind the end of the stream when that was last known. `records`: how many were handed on. `dead`:
    those of them that became dead letters; None: there are none.
    """

    position: str | None = None
    plan: str | None = None
    batch: int = 0
    at: Millis | None = None
    behind: Millis | None = None
    records: int = 0
    dead: DeadLetters | None = None
