"""A member of a group that notes what it sees, decides and commits: `python -m tests.spec.recorded_member FILE META NAME`.

It goes on until SIGTERM, at which it leaves. A line is one JSON object, written at once, so that the file of a killed member ends with a
whole one. The times are by the machine's steady clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from simulation.planting import Bug, planted
from sluiceway.adapters import system
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.cluster.group_member import GroupMember
from sluiceway.core.group.group_records import Decision, GroupView, Writes, decode_member
from sluiceway.core.group.member import Member
from sluiceway.kernel.clock import Millis
from sluiceway.model.meta import Stamp

GROUP = "g"


class Line(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A look with its decision, if it has a `view`; or else the commit of that beat (-1: the one that removes the member) that landed with
    that stamp."""

    name: str
    at: Millis
    stamp: Stamp = 0
    view: dict[str, tuple[str, Stamp]] | None = None
    owned: dict[str, tuple[int, int]] = {}
    puts: dict[str, str] | None = None
    """None: it has decided on no commit."""
    deletes: list[str] = []
    beat: int = 0


class NotingStore(SqliteMetaStore):
    """Notes which commits have landed."""

    def __init__(self, path: Path, note: Callable[[Line], None]) -> None:
        super().__init__(path)
        self._note = note

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        stamp = await super().commit(checks, unchanged, puts, deletes, hint=hint)
        members = f"group/{GROUP}/member/"
        written = [(key, decode_member(value, None).beat) for key, value in (puts or {}).items() if key.startswith(members)]
        removed = [(key, -1) for key in deletes if key.startswith(members)]
        for key, beat in (written or removed)[:1]:
            self._note(Line(name=key.removeprefix(members), at=system.steady(), stamp=stamp, beat=beat))
        return stamp


def looked(member: Member, look: GroupView, decision: Decision) -> Line:
    """The line of a look."""
    writes = decision.writes or Writes()
    return Line(
        name=member.name,
        at=look.seen_at,
        stamp=look.view.stamp,
        view={key: (entry.value.decode(), entry.stamp) for key, entry in look.view.entries.items()},
        owned={item: (token.era, token.grant) for item, token in decision.owned.items()},
        puts=None if decision.writes is None else {key: value.decode() for key, value in writes.puts.items()},
        deletes=list(writes.deletes),
    )


async def live(path: Path, meta: Path, name: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(line: Line) -> None:
        os.write(file, msgspec.json.encode(line) + b"\n")

    def looking(original: Callable[[Member, GroupView], Decision]) -> Callable[[Member, GroupView], Decision]:
        def looks(member: Member, look: GroupView) -> Decision:
            decision = original(member, look)
            note(looked(member, look, decision))
            return decision

        return looks

    with planted(Bug("look", "", Member, "look", looking)):
        store = NotingStore(meta, note)
        member = GroupMember(store, GROUP, lambda _: None, name=name)
        await member.join()
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        await over.wait()
        await member.leave()
        await store.close()


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
