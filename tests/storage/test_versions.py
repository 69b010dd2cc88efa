"""One version and the next understand each other's data, forwards and back, or say that they do not."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import apsw
import msgspec
import pytest

from sluiceway.adapters.meta import sqlite as meta_sqlite
from sluiceway.adapters.storage import partition_file
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.contract.queue_settings import QUEUE_SETTINGS, RetryBackoff
from sluiceway.contract.queue_stats import COUNTERS
from sluiceway.core.group.group_records import (
    About,
    Beat,
    Claim,
    Level,
    LoadReport,
    MemberRecord,
    Parameters,
    Pin,
    Plan,
    Resource,
    Round,
    SealedRound,
)
from sluiceway.core.group.packed_items import PackedNames, PackedOwners
from sluiceway.core.partition.bundle_ledger import LedgerRecord
from sluiceway.core.partition.idempotency_keys import KeyRecord, KeyResult
from sluiceway.core.partition.records import BlobRecord, DueRecord, ExtentRecord, Header, LeaseRecord
from sluiceway.instance.api_keys import ApiKeys
from sluiceway.instance.service import Service
from sluiceway.model import rebalance
from sluiceway.model.access import SYSTEM, ApiKey, KeySpec
from sluiceway.model.audit import AuditEntry
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Rebalance
from sluiceway.testing.drive import driven
from tests.storage.golden import fill
from tests.storage.test_migrations import check, unpacked

EARLIER = "948f848d2d187ccfcb91c36078fad9d0b3bd84d6"
"""The last version before there were API keys and an audit trail."""


@pytest.fixture(scope="module")
def earlier(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The earlier version and its tests, out of the history."""
    made = subprocess.run(["git", "archive", EARLIER, "src", "tests"], cwd=repository, capture_output=True, check=False)
    if made.returncode:
        pytest.skip("the history of the repository is not here")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def run_earlier(earlier: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the earlier version's Python."""
    environment = {**os.environ, "PYTHONPATH": f"{earlier / 'src'}{os.pathsep}{earlier / 'tests'}"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def layouts() -> tuple[int, int]:
    return len(meta_sqlite.MIGRATIONS), len(partition_file.MIGRATIONS)


FILLS = """
import asyncio, sys
from pathlib import Path
from golden import fill
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore

data = Path(sys.argv[1])
asyncio.run(fill(data, SqlitePartitionStore(data / "partitions")))
"""

LOOKS = """
import asyncio, sys
from pathlib import Path
from sluiceway.adapters.meta import sqlite as meta_sqlite
from sluiceway.adapters.storage import partition_file
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from test_migrations import check

print(len(meta_sqlite.MIGRATIONS), len(partition_file.MIGRATIONS), flush=True)
data = Path(sys.argv[1])
asyncio.run(check(data, SqlitePartitionStore(data / "partitions")))
print("all of it", flush=True)
"""
"""Finds everything that `golden.fill` puts there, and works it off."""


@driven
async def test_what_the_earlier_version_wrote_opens(earlier: Path, tmp_path: Path) -> None:
    made = run_earlier(earlier, "-c", FILLS, str(tmp_path))
    assert made.returncode == 0, made.stderr
    await check(tmp_path, SqlitePartitionStore(tmp_path / "partitions"))


@driven
async def test_the_earlier_version_opens_what_is_written_now_or_refuses(earlier: Path, tmp_path: Path) -> None:
    await fill(tmp_path, SqlitePartitionStore(tmp_path / "partitions"))
    await _add_what_is_new(tmp_path)
    looked = run_earlier(earlier, "-c", LOOKS, str(tmp_path))
    known = tuple(map(int, looked.stdout.split("\n")[0].split()))
    if known == layouts():
        assert looked.returncode == 0, looked.stderr
        assert looked.stdout.endswith("all of it\n")
    else:
        assert "newer version of Sluiceway" in looked.stderr


async def _add_what_is_new(data: Path) -> None:
    service = Service(data)
    await service.start()
    keys = ApiKeys(service.meta, service.audit)
    await keys.start()
    await keys.create(KeySpec("someone", ["read:*"]), SYSTEM)
    assert len(await keys.list()) == 1
    assert await service.audit.list(10)
    await keys.stop()
    await service.stop()


def test_a_server_says_that_the_data_is_of_a_newer_version(tmp_path: Path) -> None:
    """And writes nothing. That a partition of a newer layout stops alone is in test_migrations.py."""
    unpacked("layout-1-sqlite.tar.gz", tmp_path)
    path = tmp_path / "meta.sqlite"
    newer = layouts()[0] + 1
    db = apsw.Connection(str(path))
    db.pragma("user_version", newer)
    db.close()
    before = path.read_bytes()
    command = [sys.executable, "-m", "sluiceway.cli.main", "serve", "--data", str(tmp_path), "--listen", "127.0.0.1:0"]
    served = subprocess.run(command, capture_output=True, text=True, check=False)
    assert served.returncode != 0
    assert served.stdout == ""
    assert f"newer version of Sluiceway (layout {newer}" in served.stderr
    assert "Traceback" not in served.stderr
    assert path.read_bytes() == before


PINNED: dict[type[msgspec.Struct], str] = {
    QueueRecord: "queue_name incarnation created_at updated_at partitions version paused next_partition slots rebalance cursor "
    "lease_timeout max_lease_timeout max_attempts dead_queue expire_timeout retry_backoff idempotency_window write_timeout "
    "logical_queues reference",
    PartitionRecord: "partition backend state parents after",
    RetryBackoff: "first most",
    Header: "next head lease_number due_number now produced deduplicated leased completed retried expired dead released cleared redriven "
    "moved moved_in shut shut_cursor given_cursor taken_cursor slots_of closed_slots held_slots duplicates",
    BlobRecord: "rows columns written_at nbytes kept reasons keys bundles priorities uniques",
    ExtentRecord: "count blob row rows attempts expires_at max_lease_size gone",
    LeaseRecord: "ranges client_id deadline lease_key transfer settled staged dispositions target closed dues target_incarnation failures "
    "is_completed",
    LedgerRecord: "stored completed dead dropped closed",
    DueRecord: "due_at blob rows attempts expires_at max_lease_size is_back",
    KeyRecord: "seen sequence until",
    KeyResult: "digest first_offset count partition intended_at parts",
    ApiKey: "key_id name scopes digest created_at expires_at requests_per_second bytes_per_second",
    AuditEntry: "id at actor action queue_name request_id detail",
    Resource: "items parameters strategy era version limits load_moves pins",
    Parameters: "settle_timeout round_interval heartbeat_interval beat_interval lease_timeout member_timeout",
    MemberRecord: "beat lease_timeout applied era leaving address joined_at levels release zone",
    Beat: "beat lease_timeout applied era leaving",
    About: "address joined_at levels release zone",
    Level: "level rising_to",
    Round: "number sealed trigger participants moved kept swaps",
    Plan: "round era resource_version owners waits swapped",
    PackedNames: "ranges others",
    PackedOwners: "names members bits cells grants more",
    Pin: "instance zone",
    LoadReport: "loads round items bytes",
    Claim: "owner grant",
    Rebalance: "id queue_name incarnation requested_partitions plan drain created_at updated_at actor request_id rate state step slots "
    "homes slots_at_once paused done started_at drain_at items moved ended_at after batch problem retries",
    rebalance.Plan: "creates drains keeps reopens in_order by_key",
    SealedRound: "number trigger participants moved kept sealed_by sealed_at duration moves",
}
"""The fields of what is stored, in their order."""


@pytest.mark.parametrize("record", PINNED, ids=lambda record: record.__name__)
def test_a_record_changes_on_purpose(record: type[msgspec.Struct]) -> None:
    """An older version passes over a field that it does not know, and leaves it out when it writes the record again.

    If that is harmless, add the field here: at the end, with a default. If not, it takes a new layout, which older versions refuse
    (a migration may be empty), and data of the old one is kept (tests/data/README.md). A new setting or counter always has a default,
    and an older version cannot follow it, so these need not be added.
    """
    pinned, fields = PINNED[record].split(), msgspec.structs.fields(record)
    added = [field for field in fields if field.name in QUEUE_SETTINGS.keys() | COUNTERS.keys() and field.name not in pinned]
    assert [field.name for field in fields if field not in added] == pinned
    assert not any(field.required for field in added)
    if record.__struct_config__.array_like:
        assert fields[len(pinned) :] == tuple(added), "what is stored by position can only be added to at its end"
