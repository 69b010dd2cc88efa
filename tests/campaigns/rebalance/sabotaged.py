"""`sluiceway` for control groups: a rebalance that does not do what it must. A campaign that finds nothing wrong with these finds nothing.

`python sabotaged.py WHAT serve …`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from sluiceway.cli.main import main
from sluiceway.core.partition.admission import Admission
from sluiceway.model.queue import PartitionRecord, QueueRecord


def command(what: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), what]


def seal_what_is_not_empty() -> None:
    Admission.is_empty = property(lambda _: True)  # type: ignore[method-assign, assignment]


def forget_keys() -> None:
    honest = Admission.give_keys

    def give_keys(self: Admission, slots: object, of: int, cursor: int, partition: int) -> dict[str, bytes]:
        honest(self, slots, of, cursor, partition)  # type: ignore[arg-type]
        return {}

    Admission.give_keys = give_keys  # type: ignore[method-assign]


def overtake() -> None:
    def holds_back(self: QueueRecord, each: PartitionRecord) -> bool:
        return False

    QueueRecord.holds_back = holds_back  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {"seals": seal_what_is_not_empty, "keys": forget_keys, "order": overtake}


if __name__ == "__main__":
    SABOTAGES[sys.argv.pop(1)]()
    main()
