"""`make bench-peers`: install the peers of `make bench`, and try each of them, on loopback.

The Python clients are in the group `bench` of pyproject.toml. Each task queue of `--cases workers` has a group and an environment of its
own: they do not agree on the versions that they need. Programs come from Debian's packages if this user may install them, a newer
NATS from the Go module proxy if Go is installed, Kafka from the Java registry.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import kafka
from bench.processes import INSTALLED, program
from bench.task_queues.catalog import ENVIRONMENTS, QUEUES
from bench.task_queues.runs import FailedError, measure_speed
from sluiceway.bench import harness, systems
from sluiceway.bench.figures import progress
from sluiceway.bench.work import Work

PACKAGES = {
    "redis-server": "redis-server",
    "nats-server": "nats-server",
    "rabbitmq-server": "rabbitmq-server",
    "beanstalkd": "beanstalkd",
    "pg_ctlcluster": "postgresql",
}
"""Debian's package of each program."""
NATS = "github.com/nats-io/nats-server/v2@v2.15.2"
POLICY = Path("/usr/sbin/policy-rc.d")
TRIED = Work("cycle", "arrow", 10, 100, 1)
SECONDS = 0.5
TRIED_JOBS = 50
"""Jobs with which a task queue is tried."""
UV = {"UV_SYSTEM_CERTS": "1", "UV_HTTP_TIMEOUT": "300", "UV_HTTP_RETRIES": "10", "UV_PYTHON_DOWNLOADS": "never"}
"""Settings of uv, as `make setup` has them."""


def main(arguments: Sequence[str]) -> int:
    """Install and try the peers. Exit code 1 if one cannot be measured here."""
    parser = argparse.ArgumentParser(prog="make bench-peers", description=__doc__)
    parser.add_argument("--no-install", action="store_true", help="only try what is there")
    given = parser.parse_args(arguments)
    if not given.no_install:
        _install_packages()
        _install_nats()
        _fetch_kafka()
        _install_task_queues()
    tried = [_try(name) for name in systems.MODULES]
    # Of each environment the first: the others differ in their settings only.
    first = {queue.environment: name for name, queue in reversed(QUEUES.items())}
    tried += [_try_task_queue(name) for name in reversed(first.values())]
    return int(not all(tried))


def _install_packages() -> None:
    missing = [package for name, package in PACKAGES.items() if program(name) is None]
    if not missing:
        return
    if os.geteuid() or not shutil.which("apt-get"):
        progress(f"TO BE INSTALLED by somebody who may (on Debian: apt-get install {' '.join(missing)})")
        return
    progress(f"installing {', '.join(missing)}")
    with _nothing_starts():
        _run("apt-get", "update", "-qq")
        _run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


@contextmanager
def _nothing_starts() -> Iterator[None]:
    """Keep packages from starting their services: they would listen on arbitrary ports, and compete with the measurements."""
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            POLICY.unlink()


def _install_nats() -> None:
    if (INSTALLED / "nats-server").exists() or not shutil.which("go"):
        return
    progress(f"building {NATS}")
    with tempfile.TemporaryDirectory(prefix="sluiceway-go-") as folder:
        places = {"GOPATH": folder, "GOCACHE": f"{folder}/cache", "GOBIN": str(INSTALLED.absolute())}
        _run("go", "install", "-modcacherw", NATS, **places)


def _fetch_kafka() -> None:
    try:
        kafka.fetch("org.apache.kafka", "kafka_2.13", kafka.VERSION, Path(".tools").absolute())
    except kafka.NotFoundError as error:
        progress(f"NOT FETCHED: {error}")


def _install_task_queues() -> None:
    names = dict.fromkeys(queue.environment for queue in QUEUES.values() if queue.environment is not None)
    for name in names:
        progress(f"installing {name}")
        arguments = ("sync", "--locked", "--quiet", "--only-group", f"queue-{name}", "--python", ".tools/bin/python")
        _run(".tools/bin/uv", *arguments, **UV, UV_PROJECT_ENVIRONMENT=str(ENVIRONMENTS / name))


def _run(*command: str, **environment: str) -> None:
    """Run a command with visible output. After a failure the peer is reported as not found."""
    ended = subprocess.run(command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", **environment}, check=False)
    if ended.returncode:
        progress(f"FAILED with {ended.returncode}: {' '.join(command)}")


def _try(name: str) -> bool:
    """Start the system, run a short slice, stop it, and print its version and guarantee."""
    with harness.started([name], progress) as running:
        if name not in running:
            return False
        try:
            one = harness.slice_of(name, running[name], TRIED, SECONDS)
        except harness.FailedError as error:
            progress(f"FAILED, {name}: {error}")
            return False
    module = systems.module(name)
    print(f"{name:20} {module.version()}: {one.items:,} items went the whole way. {module.GUARANTEES[name]}", flush=True)
    return True


def _try_task_queue(name: str) -> bool:
    """Do some jobs, and print the versions."""
    queue = QUEUES[name]
    if reason := queue.found():
        progress(f"NOT MEASURED, {name}: {reason}")
        return False
    try:
        measure_speed(queue, TRIED_JOBS, TRIED_JOBS)
    except FailedError as error:
        progress(f"FAILED, {name}: {error}")
        return False
    print(f"{name:20} {queue.version()}: {3 * TRIED_JOBS} jobs were handled. {queue.choices}", flush=True)
    return True
