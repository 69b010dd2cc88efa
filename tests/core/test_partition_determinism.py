"""The same history gives the same bytes, in every process: a simulation can be replayed, and two owners agree."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

from sluiceway.core.partition.queries import ready_slices
from sluiceway.model.requests import DONE, Disposition, MovedItem, ProduceKey, Settled
from tests.core.core_model import START, Rig, Row, array_of, batch_of

DISPOSITIONS = (DONE, Disposition("retry"), Disposition("retry", retry_after=30), Disposition("dead", reason="bad"))


def history(seed: int, turns: int = 50) -> str:
    """Live through a random history; returns a digest of all that was written, in the order in which it was handed over."""
    chance, rig, said = random.Random(seed), Rig(max_attempts=3, keeps_dead=True), hashlib.sha256()
    now = START
    for turn in range(turns):
        now += chance.randrange(30)
        rig.machine.tick(now)
        for number in list(rig.machine.transfers.by_number)[:1]:
            rig.machine.transfers.end(number)
        key = ProduceKey(f"k{turn}", chance.choice([None, "g"]), turn) if chance.random() < 0.5 else None
        rig.produce([Row(b"%d" % n, now + chance.randrange(-20, 20), chance.choice([None, "k"])) for n in range(5)], now, key)
        rig.machine.lease(chance.randrange(1, 9), "c", now + chance.randrange(60), now, chance.choice([None, "k"]))
        offsets = array_of(chance.randrange(rig.machine.log.header.next) for _ in range(8))
        rig.machine.settle_offsets(offsets, chance.choice(DISPOSITIONS), now, chance.random() < 0.5, Settled())
        for number in list(rig.machine.leases)[: chance.randrange(2)]:
            rig.machine.close_lease(rig.machine.leases[number], now, Settled())
        rebalance(rig, chance, now, turn)
        if chance.random() < 0.2:
            rig.reload()
        changes = rig.commit()
        if changes is not None:
            written = (changes.txn, changes.header, list(changes.puts.items()), sorted(changes.deletes), changes.blobs)
            said.update(repr((written, sorted(changes.dropped_blobs))).encode())
    assert rig.machine.log.header.completed
    assert rig.machine.log.header.dead
    assert ready_slices(rig.machine, 1)
    return said.hexdigest()


def rebalance(rig: Rig, chance: random.Random, now: int, turn: int) -> None:
    """Items go to another partition, others come from there; keys go, and come back."""
    rig.machine.transfers.move_out(chance.randrange(1, 4), 1 << 20, 1, chance.random() < 0.5, now)
    lives = [MovedItem(chance.randrange(1, 3), now - chance.randrange(3), 1, 0, now + chance.choice([0, 40])) for _ in range(3)]
    rows = [Row(b"m")] * sum(life.rows for life in lives)
    rig.machine.produce(batch_of(rows), now, ProduceKey("m", "move/q.1", turn), lives)
    slots = chance.sample(range(16), 5)
    given = rig.machine.admission.give_keys(slots, 16, 2 * turn + 1, 0)
    rig.machine.admission.take_keys(slots, 16, 2 * turn + 2, given)
    rig.machine.admission.shut("open", turn)


def test_the_same_history_writes_the_same_bytes_in_another_process(repository: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{repository / 'src'}{os.pathsep}{repository}"}
    digests = {
        subprocess.run(
            [sys.executable, __file__, "7"],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {history(7) + "\n"}


def test_another_history_writes_other_bytes() -> None:
    assert history(7) != history(8)


if __name__ == "__main__":
    print(history(int(sys.argv[1])))
