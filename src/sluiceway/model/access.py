"""Who calls, and what they may do."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple, get_args

from sluiceway.kernel.errors import SluicewayError

Action = Literal["produce", "consume", "read", "manage", "admin"]
"""`consume`: lease and whatever settles. `read`: look without changing. `manage`: queues as a whole.
`admin`: keys, configuration, audit."""
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)


class Actor(NamedTuple):
    """Who caused a change, for the audit trail: the name of their key, and the request."""

    name: str
    request_id: str = ""


SYSTEM: Final = Actor("system")


@dataclass(frozen=True, slots=True)
class Scope:
    """One right: an action on the queues whose name matches `pattern`, in which `*` stands for any text.

    `admin` is a right of its own, on no queue: no pattern and no other action includes it.
    """

    action: Action
    pattern: str = "*"

    def covers(self, action: Action, queue_name: str) -> bool:
        return self.action == action and fnmatchcase(queue_name, self.pattern)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `scopes` None: anybody, who may do everything, because the server was told not to ask."""

    name: str
    scopes: tuple[Scope, ...] | None = None

    def may(self, action: Action, queue_name: str = "") -> bool:
        if self.scopes is None:
            return True
        if action == "admin":
            return any(scope.action == "admin" for scope in self.scopes)
        return any(scope.covers(action, queue_name) for scope in self.scopes)

    def may_all(self, action: Action) -> bool:
        """Whether it may do this to every queue there is or will be."""
        return self.scopes is None or any(scope.action == action and scope.pattern == "*" for scope in self.scopes)

    def require(self, action: Action, queue_name: str = "") -> None:
        """Raises `forbidden`. It is asked before the queue is looked up, so that the answer does not tell whether there is one."""
        if not self.may(action, queue_name):
            where = f" on queue {queue_name[:128]!r}" if queue_name else ""
            raise SluicewayError("forbidden", f"this key may not {action}{where}")


ANYBODY: Final = Caller("anybody")
