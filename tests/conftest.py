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

# Most of a short run of Spark is Java compiling itself; this halves it.
os.environ["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


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
