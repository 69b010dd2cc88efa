"""The declared pipeline of examples/pipeline: from a queue into a table, and from the table into a queue, run after run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset
import pyspark
import pytest

from sluiceway.spark.session import find_java_home
from tests.spark.spark_world import Server, server

pytest.importorskip("grpc", reason="pyspark[pipelines] is not installed here")
pytestmark = [pytest.mark.spark, pytest.mark.slow]


def run(folder: Path, world: Server) -> None:
    """`spark-pipelines run` as the example's page says it."""
    env = os.environ | {
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SLUICEWAY_URL": world.url,
    }
    program = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"
    command = [str(program), "run", "--conf", "spark.sql.catalogImplementation=hive"]
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_each_run_takes_what_came_since_the_last_one(repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(repository / "examples" / "pipeline", folder)
    spec = folder / "spark-pipeline.yml"
    text = spec.read_text()
    assert "file:///tmp/orders-pipeline" in text
    spec.write_text(text.replace("file:///tmp/orders-pipeline", (tmp_path / "storage").as_uri()))
    with server(tmp_path) as world:
        world.create("orders")
        world.create("invoices")
        for first in (0, 100):
            world.produce("orders", [f'{{"id": {n}, "shop": {n % 3}}}' for n in range(first, first + 100)])
            run(folder, world)
            ordered = pyarrow.dataset.dataset(folder / "spark-warehouse" / "orders", format="parquet").to_table().to_pydict()
            assert sorted(ordered["id"]) == list(range(first + 100))
            assert {name: world.count("orders", name) for name in ("ready", "leases", "completed")} == {
                "ready": 0,
                "leases": 0,
                "completed": first + 100,
            }
            invoices = world.call("/v1/queue.browse", queue_name="invoices", partition=0, limit=1_000)["items"]
            invoices += world.call("/v1/queue.browse", queue_name="invoices", partition=1, limit=1_000)["items"]
            assert sorted(item["reference"] for item in invoices) == sorted(ordered["origin"])
