"""What every test shares. Markers are declared in pyproject.toml."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from sluiceway.testing import memory_server

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
# Most tests want a queue without a limit of attempts, pauses and a dead queue. Those of safe queues start servers of their own.
os.environ["SLUICEWAY_SERVER__NEW_QUEUES"] = "plain"
memory_server.FLAGS["server.new_queues"] = "plain"
# Nor are the servers to which the user has given names.
os.environ["XDG_CONFIG_HOME"] = "/nowhere"

# Some tests run modules of theirs as programs.
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])

# A slow machine's Python takes more than Spark's 15 seconds to start, and then the query fails.
os.environ["PYSPARK_SUBMIT_ARGS"] = "--conf spark.python.authenticate.socketTimeout=180s pyspark-shell"

# Most of a short run of Spark is Java checking and compiling itself; this halves it.
os.environ["JAVA_TOOL_OPTIONS"] = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
)


FIRST = (
    "tests/demo/test_demo_end_to_end.py",
    "tests/capture/test_kafka_log.py",
    "tests/spark/test_spark_jobs.py",
    "conformance/test_settle.py",
    "tests/spark/test_spark_crash.py",
    "tests/campaigns/crash/test_postgres_rounds.py",
    "tests/server/test_workers.py",
    "conformance/test_misbehaviour_time.py",
    "tests/spark/test_spark_redrive.py",
    "conformance/test_lease.py",
    "tests/spark/test_spark_capture.py",
    "tests/capture/test_kafka_election.py",
    "tests/cli/test_cli_verbs.py",
    "tests/campaigns/crash/test_every_call.py",
    "tests/spark/test_spark_docs.py",
    "tests/spark/test_spark_capture_resident.py",
    "tests/spark/test_spark_end_to_end.py",
    "conformance/test_queues.py",
    "tests/spark/test_spark_archive.py",
    "tests/client/test_consumer.py",
    "tests/spark/test_spark_traps.py",
    "tests/server/test_openapi_requests.py",
    "tests/spark/test_spark_copy.py",
    "tests/campaigns/crash/test_kill_rounds.py",
    "tests/spark/test_spark_secure.py",
    "conformance/test_misbehaviour_ends.py",
    "tests/spark/test_spark_consume.py",
    "tests/capture/test_kinesis_stream.py",
    "tests/spark/test_spark_session.py",
    "conformance/test_produce.py",
    "tests/spark/test_spark_sink.py",
    "tests/capture/test_capture.py",
    "tests/spark/test_spark_json.py",
    "tests/group/test_group_member.py",
    "tests/simulation/test_sim_rebalance.py",
    "tests/capture/test_sync_logs.py",
    "tests/simulation/test_sim_cluster.py",
    "tests/storage/test_shared_stores.py",
    "tests/spark/test_spark_standalone.py",
    "tests/capture/test_postgres_stream.py",
    "tests/spark/test_spark_browse.py",
    "tests/storage/test_etcd_meta_store.py",
)
"""The files that take longest are begun first, since whatever is begun last has nothing beside it. Those that mostly compute take turns
with those that mostly wait. What is not here is only begun later."""


def shared(file: str) -> str:
    """What is started once for this test file and others: two Spark sessions serve those of Spark, one server the conformance suite."""
    folder = file.rpartition("/")[0]
    if folder == "conformance":
        return folder
    if folder == "tests/spark":
        return f"Spark session {sum(file.encode()) % 2}"
    return file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Test files that share something go to one worker, the others whole to any."""
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda test: shared(test.split("::", 1)[0])
    return scheduler


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place: dict[str, int] = {}
    for number, name in enumerate(FIRST):
        place.setdefault(shared(name), number)
    items.sort(key=lambda item: place.get(shared(item.path.relative_to(config.rootpath).as_posix()), len(FIRST)))


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A server that was started in this process logs as long as the process lives, to a stream that is only this test's.

    PySpark makes a logger for an error that passes nothing on. So pytest adds its handler to it, that of `caplog`, which all tests share,
    and the logger gives it a format of its own.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    formatters = [handler.formatter for handler in handlers]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and type(logger).__module__.startswith("pyspark."):
            logger.propagate = True
    for handler, formatter in zip(handlers, formatters, strict=True):
        handler.setFormatter(formatter)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
