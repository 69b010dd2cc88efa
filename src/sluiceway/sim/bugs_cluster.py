"""Bugs of an instance among others, to be planted: the ablations first, without which nothing else is worth anything."""

from __future__ import annotations

import asyncio
from typing import Any

from sluiceway.core.assignment.rounds import Rounds
from sluiceway.core.share import Share
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.peers import LeaseAnywhere
from sluiceway.node import group, router, service
from sluiceway.node.catalog import Catalog
from sluiceway.node.demand import Demand
from sluiceway.node.driver import QueueDriver
from sluiceway.node.group import GroupMember
from sluiceway.node.leasing import Leasing
from sluiceway.node.ownership import Clustered
from sluiceway.node.router import Router
from sluiceway.node.service import Service
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.sim.cluster_store import Vault
from sluiceway.sim.planting import Bug, shelf

ABLATIONS: list[Bug] = []
ablation = shelf(ABLATIONS)
BUGS: list[Bug] = []
bug = shelf(BUGS)
MEMBER_BUGS: list[Bug] = []
member_bug = shelf(MEMBER_BUGS)
"""Of the group's driver, which `sim/cluster_group.py` finds."""


# ---- the ablations --------------------------------------------------------------------------------------------


@ablation(Vault, "may_write")
def writes_are_not_fenced(_original: Any) -> Any:
    """A store takes what an earlier owner sends."""
    return staticmethod(lambda _store, _fence: True)


@ablation(Router, "ask")
def takes_an_unheard_answer_for_a_refusal(original: Any) -> Any:
    """A peer that did not answer is believed to have done nothing, and the request is tried elsewhere."""

    async def ask(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return await original(self, *args, **named)
        except PeerUnknownError as error:
            raise PeerRefusedError(str(error)) from error

    return ask
