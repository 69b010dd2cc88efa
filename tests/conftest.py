"""What every test shares. Markers are declared in pyproject.toml."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A deadline per example, or for the first ones together, would measure the machine, not the code. The same examples in every run, so that
# a change is judged by what it changed; `make explore` tries new ones.
settings.register_profile("sluiceway", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, derandomize=True)
settings.register_profile("explore", settings.get_profile("sluiceway"), derandomize=False, max_examples=1_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "sluiceway"))

# Whoever starts the tests in the background, or under nohup, ignores Ctrl-C, and a process inherits that. Some tests send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What a user's or a CI's shell says about proxies, colours, servers and Spark is not for the tests, which talk to their own over loopback.
os.environ["no_proxy"] = "*"
for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS"):
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("SLUICEWAY_") and not name.startswith("SLUICEWAY_TEST_")]:
    del os.environ[name]
# Nor are the servers to which the user has given names.
os.environ["XDG_CONFIG_HOME"] = "/nowhere"

# A slow machine's Python takes more than Spark's 15 seconds to start, and then the query fails.
os.environ["PYSPARK_SUBMIT_ARGS"] = "--conf spark.python.authenticate.socketTimeout=180s pyspark-shell"

# Most of a short run of Spark is Java checking and compiling itself; this halves it.
os.environ["JAVA_TOOL_OPTIONS"] = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
)


FIRST = (
    "tests/test_demo_end_to_end.py",
    "tests/test_kafka_log.py",
    "tests/test_spark_jobs.py",
    "conformance/test_settle.py",
    "tests/test_spark_crash.py",
    "tests/crash/test_postgres_rounds.py",
    "tests/test_workers.py",
    "conformance/test_misbehaviour_time.py",
    "tests/test_spark_redrive.py",
    "conformance/test_lease.py",
    "tests/test_spark_capture.py",
    "tests/test_kafka_election.py",
    "tests/test_cli_verbs.py",
    "tests/crash/test_every_call.py",
    "tests/test_spark_docs.py",
    "tests/test_spark_capture_resident.py",
    "tests/test_spark_end_to_end.py",
    "conformance/test_queues.py",
    "tests/test_spark_archive.py",
    "tests/test_consumer.py",
    "tests/test_spark_traps.py",
    "tests/test_openapi_requests.py",
    "tests/test_spark_copy.py",
    "tests/crash/test_kill_rounds.py",
    "tests/test_spark_secure.py",
    "conformance/test_misbehaviour_ends.py",
    "tests/test_spark_consume.py",
    "tests/test_kinesis_stream.py",
    "tests/test_spark_session.py",
    "conformance/test_produce.py",
    "tests/test_spark_sink.py",
    "tests/test_capture.py",
    "tests/test_spark_json.py",
    "tests/test_group_member.py",
    "tests/test_sim_rebalance.py",
    "tests/test_sync_logs.py",
    "tests/test_sim_cluster.py",
    "tests/test_shared_stores.py",
    "tests/test_spark_standalone.py",
    "tests/test_postgres_stream.py",
    "tests/test_spark_browse.py",
    "tests/test_etcd_meta_store.py",
)
"""The files that take longest are begun first, since whatever is begun last has nothing beside it. Those that mostly compute take turns
with those that mostly wait. What is not here is only begun later."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {config.rootpath / name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(FIRST)))


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A server that was started in this process logs as long as the process lives, to a stream that is only this test's."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
