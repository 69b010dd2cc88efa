"""What an instance holds of partitions in its store goes when they do."""

from __future__ import annotations

from pathlib import Path

from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import cluster, ref, shares
from tests.instance.instance_rig import eventually, spec


@driven
async def test_what_goes_to_another_instance_is_let_go_and_so_is_what_is_deleted(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a") as (made, (a,)):
        await a.create_queue(spec("q", 4))
        released = made.stores["a"].released
        assert released == []
        b = await made.start("b")
        await eventually(lambda: len(shares(a, "q")) == len(shares(b, "q")) == 2)
        gone, kept = ({ref(a, "q", number) for number in shares(service, "q")} for service in (b, a))
        await eventually(lambda: set(released) == gone)
        # A file that is deleted takes its room as long as anybody has it open.
        await b.delete_queue("q", force=True)
        await eventually(lambda: set(released) == gone | kept)
