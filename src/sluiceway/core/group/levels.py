"""Raising a group's compatibility level: to one that all members understand, and with no other member joining meanwhile.

Members come and go while the level rises, so it takes two commits. The first announces the level: a member joins by a commit that checks
the level's record, so every member that joins after it understands the new level. The second raises the level, from a later look in which
all members do. Both check the record, so any process may repeat them.
"""

from __future__ import annotations

from sluiceway.core.group.group_records import GroupView, Keys, Level, Writes
from sluiceway.kernel.compatibility import Levels


def admits(level: Level | None, levels: Levels | None) -> bool:
    """Whether a member that understands these levels may join."""
    if levels is None:
        return True
    return level is not None and levels.oldest <= level.level and max(level.level, level.rising_to) <= levels.newest


def understood(look: GroupView, newest: int) -> int:
    """The highest level that all members and this process understand."""
    return min([newest, *(record.levels.newest if record.levels else 0 for record in look.members.values())])


def next_step(look: GroupView, keys: Keys, level: int) -> Writes | None:
    """The next commit that raises the group to that level, or, if a member is behind or the level is reached, takes an announcement back.

    None: there is nothing to do.
    """
    assert look.level is not None, "the group has a level"
    before = look.level
    if before.level >= level or understood(look, level) < level:
        if not before.rising_to:
            return None
        after = Level(level=before.level)
    elif before.rising_to == level:
        after = Level(level=level)
    else:
        after = Level(level=before.level, rising_to=level)
    writes = Writes(checks={keys.level: look.stamp(keys.level)})
    writes.put(keys.level, after)
    return writes
