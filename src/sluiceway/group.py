"""Divide anything among processes: the group API.

Every process joins the group as a member and is told which items are its own, each with a token that fences its writes. Items go to another
member when one leaves, dies or is cut off. docs/guides/groups.md has the guarantees and an example.
"""

from __future__ import annotations

from sluiceway.adapters.meta.opening import open_meta_store
from sluiceway.cluster.group_member import Gained, GroupMember, Lost, define
from sluiceway.core.group.group_records import Parameters, Resource, Token
from sluiceway.ports.meta_store import MetaStore

__all__ = ["Gained", "GroupMember", "Lost", "MetaStore", "Parameters", "Resource", "Token", "define", "open_meta_store"]
