"""`sluiceway` for a control group: an instance never lets go of what it owns, and storage does not ask for its fence.

`python unfenced.py serve …`. A campaign that finds nothing wrong with these finds nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from sluiceway.adapters.storage import postgres
from sluiceway.cli.main import main
from sluiceway.cluster.group_member import GroupMember
from sluiceway.core.group.group_records import Token
from sluiceway.kernel.clock import Millis

COMMAND = [sys.executable, str(Path(__file__).resolve())]
FENCED = "fence_era = %b AND fence_grant = %b AND fence_opening = %b AND txn = %b"
UNFENCED = "(%b::int8 + %b::int8 + %b::int8 + %b::int8) IS NOT NULL"
LONG: Millis = 3_600_000


def unfence() -> None:
    assert FENCED in postgres._CYCLE
    postgres._CYCLE = postgres._CYCLE.replace(FENCED, UNFENCED)
    honest = GroupMember._serve

    async def serve(self: GroupMember, owned: Mapping[str, Token], lease_deadline: Millis) -> None:
        await honest(self, {**self._held, **owned}, lease_deadline + LONG)

    GroupMember._serve = serve  # type: ignore[method-assign]


if __name__ == "__main__":
    unfence()
    main()
