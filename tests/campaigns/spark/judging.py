"""What the sinks have, what the tasks have read and what the server has counted: whether it fits together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


@dataclass(frozen=True)
class Faults:
    """`kind` is one of `lost`, `doubled`, `phantom`, `other rows`, `left` and `miscounted`."""

    found: tuple[tuple[str, str], ...] = ()

    def __add__(self, other: Faults) -> Faults:
        return Faults(self.found + other.found)

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.found}

    @property
    def lines(self) -> list[str]:
        return [f"{kind}: {what}" for kind, what in self.found]


def judge_names(what: str, names: pa.ChunkedArray, items: int, once: bool) -> Faults:
    """Whether a sink has the names 0 to `items` - 1 (as text), each at least once, or exactly `once`."""
    names = names.cast(pa.int64())
    distinct = pc.unique(names)
    known = pc.and_(pc.greater_equal(distinct, 0), pc.less(distinct, items))
    phantoms = distinct.filter(pc.invert(known))
    found = [("phantom", f"{what} has {phantoms[0]}, and {len(phantoms)} in all that nobody sent")] if len(phantoms) else []
    if missing := items - (len(distinct) - len(phantoms)):
        first = pc.index(pc.is_in(pa.array(range(items)), distinct), False)
        found.append(("lost", f"{what} does not have {missing} items, such as {first}"))
    if once and (more := len(names) - len(distinct)):
        found.append(("doubled", f"{what} has {more} items more than once"))
    return Faults(tuple(found))


def folders(folder: Path) -> pa.Table:
    """The rows of the sink that has a folder per batch."""
    return read_parquet(folder / "folders")


def read_parquet(folder: Path) -> pa.Table:
    """What Spark has committed there; `batch` is the folder's, if there is one."""
    tables = []
    for file in sorted(folder.rglob("part-*.parquet")):
        if "_temporary" in file.parts:
            continue
        table = pq.read_table(file, partitioning=None)
        number = int(file.parent.name.partition("=")[2] or 0)
        tables.append(table.append_column("batch", pa.repeat(number, table.num_rows)))
    empty = pa.table({"id": pa.array([], pa.utf8()), "text": pa.array([], pa.utf8()), "outcome": pa.array([], pa.utf8())})
    return pa.concat_tables(tables) if tables else empty.append_column("batch", pa.array([], pa.int64()))


def judge_reads(folder: Path) -> tuple[Faults, int]:
    """Whether every attempt of a task has read what the others of that task did, in that order, up to where it was killed; and how many
    attempts were compared with another.
    """
    attempts: dict[str, list[tuple[bool, pa.Table]]] = {}
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        task = path.name.rpartition("-")[0]
        attempts.setdefault(task, []).append((path.suffix == ".whole", _recorded(path)))
    found, compared = [], 0
    for task, reads in attempts.items():
        longest = max((rows for _, rows in reads), key=lambda rows: rows.num_rows)
        compared += len(reads) - 1
        for whole, rows in reads:
            if rows.num_rows and not rows.equals(longest.slice(0, rows.num_rows)):
                found.append(("other rows", f"an attempt of task {task} read other items than another, or in another order"))
            elif whole and rows.num_rows < longest.num_rows:
                found.append(("other rows", f"an attempt of task {task} read {rows.num_rows} items, another {longest.num_rows}"))
    return Faults(tuple(found)), compared


def _recorded(path: Path) -> pa.Table:
    """What stands in it whole: its process may have been killed."""
    batches: list[pa.RecordBatch] = []
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            batches.extend(stream)
    except (pa.ArrowInvalid, OSError):
        pass
    return pa.Table.from_batches(batches).combine_chunks() if batches else pa.table({})


def judge_outcomes(rows: pa.Table, counters: Mapping[str, int], buried: pa.ChunkedArray, items: int) -> Faults:
    """Whether each row of the sink that replaces has taken effect once: by the server's counters, as far as they are given, and by what
    lies in the dead queue."""
    outcomes = {each["values"]: each["counts"] for each in pc.value_counts(rows.column("outcome")).to_pylist()}
    expected = {
        "produced": items,
        "completed": outcomes.get("done", 0),
        "retried": outcomes.get("retry", 0),
        "dead": outcomes.get("dead", 0),
    }
    found = [
        ("miscounted", f"{name} is {counters[name]}, and the sink has {count}")
        for name, count in expected.items()
        if counters.get(name, count) != count
    ]
    if (ids := pc.count_distinct(rows.column("id")).as_py()) < rows.num_rows:
        found.append(("doubled", f"{rows.num_rows - ids} rows are in more than one batch"))
    dead = rows.filter(pc.equal(rows.column("outcome"), "dead")).column("text")
    if sorted(dead.to_pylist()) != sorted(buried.to_pylist()):
        found.append(("miscounted", f"the dead queue has {len(buried)} items, {len(dead)} died, and they are not the same"))
    return Faults(tuple(found)) + judge_rest(counters)


def judge_rest(counters: Mapping[str, int]) -> Faults:
    """Nothing is left in the queue, and no lease."""
    return Faults(tuple(("left", f"{name} is {counters[name]}") for name in ("total", "leases") if counters[name]))
