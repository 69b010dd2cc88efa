"""Comparison of two configurations: the changed keys, and those that need a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.backends import BackendSettings, MemoryBackend, kind_of
from sluiceway.model.configuration import SECTIONS, Configuration
from sluiceway.model.settings import Settings, keys


class Plan(NamedTuple):
    """Names of the changed keys; `restart`: for those that cannot change while the server runs, the reason."""

    changed: list[str]
    restart: dict[str, str]

    def check(self) -> None:
        """Raise `restart_required`, naming every such key, if there is one."""
        if self.restart:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.restart.items())
            raise SluicewayError("restart_required", f"nothing was applied. {reasons}", next(iter(self.restart)))


def plan(old: Configuration, new: Configuration, holding: Mapping[str, int]) -> Plan:
    """Compare two configurations. `holding`: number of partitions on each backend."""
    planned = Plan([], {})
    for section in SECTIONS:
        _compare(planned, section, getattr(old, section), getattr(new, section))
    for name in sorted({*old.backends, *new.backends}):
        _compare_backend(planned, name, old.backends.get(name), new.backends.get(name), holding.get(name, 0))
    if any(_is_memory(each) for each in old.backends.values()) != any(_is_memory(each) for each in new.backends.values()):
        planned.restart["backends"] = "from memory to another kind of storage, or back, requires a restart"
    return planned


def _compare_backend(planned: Plan, name: str, old: BackendSettings | None, new: BackendSettings | None, partitions: int) -> None:
    where = f"backends.{name}"
    if old is None or new is None:
        planned.changed.append(where)
        if new is None and partitions:
            planned.restart[where] = (
                f"it holds {partitions} partitions, which would not be served; delete their queues first, or put the backend back into "
                "the file"
            )
    elif type(old) is not type(new):
        planned.changed.append(f"{where}.kind")
        planned.restart[f"{where}.kind"] = f"from {kind_of(old)} to {kind_of(new)} requires a restart"
    else:
        _compare(planned, where, old, new)


def _compare(planned: Plan, where: str, old: Settings, new: Settings) -> None:
    for each in keys(type(old)):
        if getattr(old, each.name) == getattr(new, each.name):
            continue
        name = f"{where}.{each.name}"
        planned.changed.append(name)
        if each.restart:
            planned.restart[name] = "takes effect at a restart"


def _is_memory(settings: Any) -> bool:
    return isinstance(settings, MemoryBackend)
