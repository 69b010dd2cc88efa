"""Records of bundles in the meta store."""

from __future__ import annotations

import msgspec

from sluiceway.contract.bundle_answers import BundleState
from sluiceway.kernel.clock import Millis
from sluiceway.model.item_keys import hash_of
from sluiceway.model.requests import BundleCount

BUNDLE_GROUP = "bundle/"
"""Prefix of the idempotency groups of follow-ups; the bundle's id follows."""


class FollowUp(msgspec.Struct, frozen=True):
    """What is produced when the bundle is over. `item`: as JSON, with the fields of a produce."""

    queue_name: str
    item: msgspec.Raw


class BundleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle: items of one queue. `items`: it is closed when so many are stored. `count` and `follow_up_id` are those of an ended one."""

    id: str
    queue_name: str
    queue_incarnation: str
    follow_up: FollowUp | None
    items: int | None
    state: BundleState = "open"
    created_at: Millis
    closed_at: Millis | None = None
    ended_at: Millis | None = None
    count: BundleCount | None = None
    follow_up_id: str = ""

    @property
    def hashed(self) -> int:
        """The number by which partitions know it."""
        return hash_of(self.id)

    @property
    def group(self) -> str:
        """The idempotency group of its follow-up."""
        return BUNDLE_GROUP + self.id
