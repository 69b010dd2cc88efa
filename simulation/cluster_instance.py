"""Instance of a simulated cluster: a whole service in a process that can be killed, frozen and cut off."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulation.loop import Process
from simulation.network_link import Link
from sluiceway.cluster.ownership import Clustered
from sluiceway.core.group.group_records import Token
from sluiceway.instance.service import Service


@dataclass(eq=False)
class Instance:
    """One server process from start to end. A restarted one is another Instance."""

    process: Process
    service: Service
    meta: Link
    store: Link
    serves: bool = False
    """Whether it takes requests."""
    going: bool = False
    callers: list[Link] = field(default_factory=list)
    owned: dict[str, Token] = field(default_factory=dict)
    """Items owned at the last check."""

    @property
    def name(self) -> str:
        return self.process.name

    def owns(self) -> dict[str, Token]:
        ownership = self.service.ownership
        if self.process.dead or not isinstance(ownership, Clustered) or ownership._member is None:
            return {}
        return self.process.context.run(lambda: ownership.member.items)
