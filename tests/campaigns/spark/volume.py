"""Many items through `sluiceway spark ingest`, `process` and `archive`: memory stays flat, and the archive has what the files had."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from sluiceway.spark.options import Server
from sluiceway.spark.server_calls import Client
from tests.campaigns.kit.report import Report
from tests.campaigns.spark.memory_curves import Curve, Watch, after_collections
from tests.server.server_process import COMMAND, ServerProcess

SIZE = 1_024
"""Bytes of a payload."""
FILES = 4
DEAD_OF = 1_000
"""One of so many items is judged dead."""
BATCHES = 20
"""Of `process` and `archive` at least: what is flat shows after some of them."""
GROWTH = 0.15
"""Of what a curve has at most: so much may its last third lie above its middle third."""
FILLED = 500_000
"""Items from which the curves of server and JVM are judged: with fewer, the server still fills its cache of rows (128 MiB), and no
collection has looked at the JVM's old objects.
"""
SLACK = 64.0
"""MiB by which a curve may rise all the same: no run of a garbage collector is like the other."""

_BLOCK = 10_000
_HEAD = b'{"id":"%010d","text":"'
_ID_AT = 7
_TEXT_AT = len(_HEAD % 0)
_WEIGHTS = np.random.default_rng(1).integers(1, 2**63, SIZE // 8, dtype=np.uint64) | np.uint64(1)

JUDGE = f"""
from pyspark.sql import functions as F

URL = {{url!r}}

def judge(items, batch):
    number = F.get_json_object(F.col("payload").cast("string"), "$.id").cast("bigint")
    judged = items.withColumn("outcome", F.when(number % {DEAD_OF} == 0, "dead").otherwise("done"))
    good = judged.where("outcome = 'done'").select("payload", F.lit("judged").alias("kind"), F.col("id").alias("reference"))
    good.write.format("sluiceway").mode("append").options(url=URL, queue="judged", writeId=f"judged/{{{{batch}}}}").save()
    return judged.select("id", "outcome", F.lit("a multiple of {DEAD_OF}").alias("reason"))
"""


def run_volume(report: Report, folder: Path, items: int = 1_000_000, memory: str = "4g") -> dict[str, dict[str, Curve]]:
    """`items` of 1 KB through the three jobs, with so much memory for Spark's JVM. Returns the curves of each stage."""
    sent = write_files(folder / "in", items)
    report.say(f"{items:,} items of {SIZE} bytes in {FILES} files")
    curves = {}
    with ServerProcess(folder / "data") as server:
        calls = _Calls(server.url)
        calls.create("graveyard")
        calls.create("orders", requested_partitions=4, dead_queue="graveyard")
        calls.create("judged", requested_partitions=4)
        (folder / "volume_judge.py").write_text(JUDGE.format(url=server.url))
        batches = ["--once", "--max-items", str(min(50_000, max(1, items // BATCHES)))]
        stages = {
            "ingest": ["orders", "in", "--format", "json"],
            "process": ["orders", "volume_judge:judge", "--checkpoint", "process-checkpoint", *batches],
            "archive": ["judged", "--to", "archive", "--checkpoint", "archive-checkpoint", *batches],
        }
        for name, arguments in stages.items():
            curves[name] = _stage(report, folder, server, name, arguments, memory, items)
            if name == "ingest":
                shutil.rmtree(folder / "in")
        dead = calls.payloads("graveyard")
        left = {queue: calls.left(queue) for queue in ("orders", "judged")}
    for queue, count in left.items():
        if count:
            report.fail(f"{count:,} items are left in {queue}")
    archived = _archived(folder / "archive")
    judge_ledger(report, sent, archived, digests_of(dead))
    code, out = _command(folder, ["spark", "archive", "--verify", "archive"], {})
    report.say(out.strip().splitlines()[-1] if out.strip() else "archive --verify said nothing")
    if code:
        report.fail(f"archive --verify ended with {code}")
    return curves


def write_files(folder: Path, items: int) -> npt.NDArray[np.uint64]:
    """Files of JSON lines, each of SIZE bytes with an id of its own; returns the digest of each line, by id."""
    folder.mkdir(parents=True)
    digests = np.zeros(items, np.uint64)
    each = -(-items // FILES)
    for number in range(FILES):
        with (folder / f"orders-{number}.jsonl").open("wb") as file:
            for first in range(number * each, min(items, (number + 1) * each), _BLOCK):
                rows = _lines(first, min(_BLOCK, items - first, (number + 1) * each - first))
                digests[first : first + len(rows)] = _digest(rows[:, :SIZE])
                file.write(rows.tobytes())
    return digests


def _lines(first: int, count: int) -> npt.NDArray[np.uint8]:
    """One a row, with its line end. What is in them cannot be compressed by more than half."""
    rows = np.empty((count, SIZE + 1), np.uint8)
    heads = b"".join(_HEAD % number for number in range(first, first + count))
    rows[:, :_TEXT_AT] = np.frombuffer(heads, np.uint8).reshape(count, _TEXT_AT)
    hexadecimal = np.frombuffer(b"0123456789abcdef", np.uint8)
    rows[:, _TEXT_AT : SIZE - 2] = hexadecimal[np.random.default_rng(first).integers(0, 16, (count, SIZE - 2 - _TEXT_AT), np.uint8)]
    rows[:, SIZE - 2 :] = np.frombuffer(b'"}\n', np.uint8)
    return rows


def _digest(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    words = np.ascontiguousarray(rows).view(np.uint64)
    found: npt.NDArray[np.uint64] = (words * _WEIGHTS).sum(axis=1, dtype=np.uint64)
    return found


class Digests:
    """Of many payloads: which ids, and the digest of each."""

    def __init__(self) -> None:
        self.ids: list[npt.NDArray[np.int64]] = []
        self.digests: list[npt.NDArray[np.uint64]] = []
        self.odd = 0

    def add(self, payloads: pa.Array) -> None:
        good = pc.equal(pc.binary_length(payloads), SIZE)
        self.odd += len(payloads) - (pc.sum(good).as_py() or 0)
        payloads = payloads.filter(good)
        if len(payloads):
            rows = np.frombuffer(b"".join(payloads.to_pylist()), np.uint8).reshape(-1, SIZE)
            digits = rows[:, _ID_AT : _ID_AT + 10].astype(np.int64) - ord("0")
            self.ids.append(digits @ (10 ** np.arange(9, -1, -1)))
            self.digests.append(_digest(rows))

    def all(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        if not self.ids:
            return np.zeros(0, np.int64), np.zeros(0, np.uint64)
        return np.concatenate(self.ids), np.concatenate(self.digests)


def digests_of(payloads: pa.Array) -> Digests:
    found = Digests()
    found.add(payloads)
    return found


def _archived(root: Path) -> Digests:
    found = Digests()
    for batch in ds.dataset(root, format="parquet", partitioning="hive").to_batches(columns=["payload"], batch_size=_BLOCK):
        found.add(batch.column(0))
    return found


def judge_ledger(report: Report, sent: npt.NDArray[np.uint64], archived: Digests, dead: Digests) -> None:
    """What was sent is archived once, but for what was to die, and that is in the dead queue once."""
    every = np.arange(len(sent))
    for name, found, expected in (
        ("the archive", archived, every[every % DEAD_OF > 0]),
        ("the dead queue", dead, every[every % DEAD_OF == 0]),
    ):
        ids, digests = found.all()
        if found.odd:
            report.fail(f"{found.odd:,} items in {name} are not of {SIZE} bytes")
        times = np.bincount(ids, minlength=len(sent)) if len(ids) else np.zeros(len(sent), np.int64)
        if len(times) > len(sent):
            report.fail(f"{name} has ids that nobody sent")
        lost, foreign = np.setdiff1d(expected, ids), np.setdiff1d(ids, expected)
        twice = np.flatnonzero(times > 1)
        changed = ids[(ids < len(sent))][digests[ids < len(sent)] != sent[ids[ids < len(sent)]]]
        for what, some in (("lacks", lost), ("has what it should not have", foreign), ("has twice", twice), ("has changed", changed)):
            if len(some):
                report.fail(f"{name} {what}: {len(some):,} items, such as {some[:3].tolist()}")
        report.figure(f"{len(ids):,} items in {name}, of {len(expected):,} that belong there")


def _stage(
    report: Report, folder: Path, server: ServerProcess, name: str, arguments: list[str], memory: str, items: int
) -> dict[str, Curve]:
    command = ["spark", name, *arguments, "--url", server.url, "--conf", f"spark.driver.memory={memory}", "--json", "--every", "10s"]
    logs = folder / f"{name}-gc"
    logs.mkdir()
    begun = time.monotonic()
    watching: list[Watch] = []
    code, out = _command(
        folder,
        command,
        {"JDK_JAVA_OPTIONS": f"-Xlog:gc:file={logs}/%p.log"},
        lambda pid: watching.append(Watch(server.process.pid, pid)),
        watching,
    )
    seconds = time.monotonic() - begun
    if code:
        raise RuntimeError(f"{name} ended with {code}: {(folder / 'commands.log').read_text()[-2_000:]}")
    result = json.loads(out.splitlines()[-1])
    curves = watching[0].curves
    # Spark's launcher is a JVM, too, with nothing to collect.
    collected = max(map(after_collections, logs.glob("*.log")), key=lambda curve: len(curve.mib), default=Curve())
    curves["heap after collections"] = collected
    told = ", ".join(f"{part} {curve.most:,.0f}" for part, curve in curves.items())
    busy = sum(1 for mib in curves["workers"].mib if mib)
    rates = f"{items / seconds:,.0f} rows/s in {seconds:.0f} s, of which {busy:.0f} s with tasks"
    report.figure(f"{name}: {rates}; MiB at most: {told}; {result}")
    judge_memory(report, name, curves, items)
    return curves


def judge_memory(report: Report, stage: str, curves: dict[str, Curve], items: int) -> None:
    busy = curves["workers"].mib
    begun = next((at for at, mib in zip(curves["workers"].seconds, busy, strict=True) if mib), 0.0)
    # What a JVM has resident only says how much it was given. What it needs is what the best of its collections leave: the others are of
    # young objects alone, and old garbage stays.
    for part, of in (("server", statistics.median), ("workers", statistics.median), ("heap after collections", min)):
        curve = curves[part].since(begun)
        growth = curve.growth(of)
        if growth is None:
            report.say(f"{stage}: {len(curve.mib)} samples of {part}: too few to say whether it is flat")
            continue
        report.say(f"{stage}: {part} {growth:+.0f} MiB from its middle third to its last, {curve.most:.0f} at most")
        if growth > max(SLACK, GROWTH * curve.most) and (part == "workers" or items >= FILLED):
            report.fail(f"{stage}: {part} grew by {growth:.0f} MiB from its middle third to its last")


def _command(
    folder: Path, arguments: list[str], environment: dict[str, str], begun: Any = lambda pid: None, watching: list[Watch] | None = None
) -> tuple[int, str]:
    """(exit code, stdout), of a command in this folder; its stderr goes into a file beside."""
    everything = os.environ | {"SLUICEWAY_API_KEY": "", "SLUICEWAY_CA_FILE": ""} | environment
    with (folder / "commands.log").open("ab") as log:
        process = subprocess.Popen([*COMMAND, *arguments], cwd=folder, env=everything, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            begun(process.pid)
            out, _ = process.communicate()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            for watch in watching or []:
                watch.end()
    return process.returncode, out


class _Calls:
    """To a server, as a test has them."""

    def __init__(self, url: str) -> None:
        self._server = Server(url, "", 60_000)

    def call(self, path: str, **body: object) -> dict[str, Any]:
        client = Client(self._server)
        try:
            return client.call(path, body)
        finally:
            client.close()

    def create(self, queue: str, **settings: object) -> None:
        self.call("/v1/queues.create", queue_name=queue, **settings)

    def left(self, queue: str) -> int:
        stats = self.call("/v1/queue.stats", queue_name=queue)
        return sum(part["total"] for logical in stats["logical_queues"] for part in logical["partitions"])

    def payloads(self, queue: str) -> pa.Array:
        """Of a queue with one partition and up to 10,000 items, which are on their way there at most for a while."""
        client = Client(self._server)
        try:
            answer = client.fetch_arrow("/v1/queue.peek", {"queue_name": queue, "partition": 0, "limit": 10_000})
            return answer.read_all().column("payload").combine_chunks()
        finally:
            client.close()


def plot(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    """One panel for each stage."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(11, 3.4), sharey=True, layout="constrained")
    for panel, (stage, parts) in zip(panels, curves.items(), strict=True):
        for part, curve in parts.items():
            panel.plot(curve.seconds, curve.mib, label=part, linewidth=1.2)
        panel.set_title(stage)
        panel.set_xlabel("seconds")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("MiB")
    panels[-1].legend(loc="upper right", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--memory", default="4g", help="of Spark's JVM")
    parser.add_argument("--keep", type=Path, help="a folder, made anew, that keeps data and logs")
    parser.add_argument("--plot", type=Path, help="where to draw the curves")
    given = parser.parse_args()
    report = Report("volume")
    with tempfile.TemporaryDirectory(prefix="sluiceway-volume-") as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=given.keep is None)
        curves = run_volume(report, folder, given.items, given.memory)
        if given.plot:
            plot(curves, given.plot)
    for line in (*report.figures, *(f"WRONG: {line}" for line in report.wrong)):
        print(line)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
