"""The task queues that are measured, and how the worker of each is started."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import NamedTuple

from bench.task_queues import brokers
from bench.task_queues.job_record import CONCURRENCY

ENVIRONMENTS = Path(".tools/queues")
"""Directory with an environment for each group `queue-…` of pyproject.toml."""
OURS = "sluiceway"
EVERYSEC = "-everysec"
"""End of the names of systems whose Redis syncs once a second."""
_PACKAGE = "bench.task_queues"
_AT_ONCE = str(CONCURRENCY)


class TaskQueue(NamedTuple):
    """A system. `environment`: of its packages, None: the one of Sluiceway. `worker`: command, from the environment's `bin`.

    `choices`: how it is set up, and why, in two sentences for its maintainers. `links`: the parts of its documentation that say so.
    """

    module: str
    environment: str | None
    broker: type[brokers.Broker]
    worker: tuple[str, ...]
    choices: str
    links: tuple[str, ...]
    share: float = 1.0
    """Fraction of the jobs that a slow system does: its rate does not depend on their number, and all of them would take many minutes."""

    @property
    def bin(self) -> Path:
        return Path(sys.executable).parent if self.environment is None else (ENVIRONMENTS / self.environment / "bin").absolute()

    def found(self) -> str | None:
        """Return why it cannot run on this machine, and a remedy; None if it can."""
        if not (self.bin / self.worker[0]).exists():
            return f"{self.environment} is not installed; `make bench-peers` does it"
        return self.broker.found()

    def version(self) -> str:
        """The version of its package and of its server."""
        if self.environment is None:
            return self.broker.version()
        folders = [str(each) for each in self.bin.parent.glob("lib/python*/site-packages")]
        packages = ("taskiq", "taskiq-redis") if self.environment == "taskiq" else (self.environment,)
        versions = [f"{name} {each.version}" for name in packages for each in importlib.metadata.distributions(name=name, path=folders)]
        return ", ".join([*versions, self.broker.version()])


def _sluiceway(handler: str, choices: str, *options: str) -> TaskQueue:
    worker = ("sluiceway", "work", f"{_PACKAGE}.sluiceway_jobs:{handler}", "--queue", "jobs", "--concurrency", _AT_ONCE, *options)
    return TaskQueue("sluiceway_jobs", None, brokers.Sluiceway, worker, choices, ("../guides/workers.md", "../guides/client.md#producer"))


def _celery(broker: type[brokers.Broker], pool: str, concurrency: str, choices: str) -> TaskQueue:
    worker = ("celery", "-A", f"{_PACKAGE}.celery_jobs", "worker", "--pool", pool, "--concurrency", concurrency, "--loglevel", "WARNING")
    links = (
        "https://docs.celeryq.dev/en/stable/userguide/optimizing.html",
        "https://docs.celeryq.dev/en/stable/getting-started/backends-and-brokers/redis.html",
    )
    return TaskQueue("celery_jobs", "celery", broker, worker, choices, links, share=0.2)


def _dramatiq(broker: type[brokers.Broker], choices: str) -> TaskQueue:
    worker = ("dramatiq", f"{_PACKAGE}.dramatiq_jobs", "--processes", "1", "--threads", _AT_ONCE)
    links = ("https://dramatiq.io/guide.html", "https://dramatiq.io/reference.html#dramatiq.brokers.redis.RedisBroker")
    return TaskQueue("dramatiq_jobs", "dramatiq", broker, worker, choices, links)


def _arq(broker: type[brokers.Broker], choices: str) -> TaskQueue:
    worker = ("arq", f"{_PACKAGE}.arq_jobs.WorkerSettings", "--custom-log-dict", f"{_PACKAGE}.arq_jobs.QUIET")
    return TaskQueue("arq_jobs", "arq", broker, worker, choices, ("https://arq-docs.helpmanual.io/#usage",), share=0.2)


def _rq(broker: type[brokers.Broker], choices: str) -> TaskQueue:
    worker = ("rq", "worker", "--worker-class", "rq.worker.SimpleWorker", "--quiet", "--maintenance-interval", "5")
    links = (
        "https://python-rq.org/docs/workers/",
        "https://python-rq.org/docs/#bulk-job-enqueueing",
        "https://python-rq.org/docs/exceptions/",
    )
    return TaskQueue("rq_jobs", "rq", broker, worker, choices, links, share=0.1)


def _taskiq(broker: type[brokers.Broker], choices: str) -> TaskQueue:
    options = ("--workers", "1", "--max-async-tasks", _AT_ONCE, "--log-level", "WARNING")
    links = ("https://taskiq-python.github.io/guide/cli.html", "https://github.com/taskiq-python/taskiq-redis")
    return TaskQueue("taskiq_jobs", "taskiq", broker, ("taskiq", "worker", f"{_PACKAGE}.taskiq_jobs:broker", *options), choices, links)


_LESS_DURABLE = (
    "As {}, but Redis syncs its file once a second: it loses up to that when the machine crashes. That is the default of its append-only "
    "file."
)

QUEUES: dict[str, TaskQueue] = {
    OURS: _sluiceway(
        "job",
        "`sluiceway work` with an `async def` handler, and a prefetch of 1,000, since a higher one needs fewer calls; `client.producer` "
        "sends the jobs, and gathers them into calls. The server is one process on SQLite with synchronous=FULL.",
        *("--prefetch", "1000"),
    ),
    "sluiceway-threads": _sluiceway(
        "job_in_thread", "A `def` handler, which runs in one of 64 threads, and the default prefetch of 100. All else as `sluiceway`."
    ),
    "celery": _celery(
        brokers.Redis,
        "threads",
        _AT_ONCE,
        "The pool of 64 threads, `task_acks_late` and `task_reject_on_worker_lost`, so that a job outlives its worker; no results. "
        "The prefetch multiplier is 64, as the guide advises for many short tasks.",
    ),
    "celery-prefork": _celery(
        brokers.Redis,
        "prefork",
        "2",
        "As `celery`, with the default pool, prefork, of as many processes as this machine has cores.",
    ),
    "dramatiq": _dramatiq(
        brokers.Redis,
        "One process of 64 threads, all else by default: messages are acknowledged after the actor, and prefetched two for each thread. "
        "The messages of a dead worker are put back by the broker's maintenance, which one of a thousand commands starts.",
    ),
    "arq": _arq(
        brokers.Redis,
        "`max_jobs` of 64 on uvloop, results not kept, no log line for each job. It polls each 10 ms (`poll_delay`): with the default of "
        "500 ms a job waits for half of that on average.",
    ),
    "rq": _rq(
        brokers.Redis,
        "`SimpleWorker`, which does not fork for each job, and does one at a time. `Retry` has RQ put back the "
        "jobs of a dead worker; the producer uses `enqueue_many`.",
    ),
    "procrastinate": TaskQueue(
        "procrastinate_jobs",
        "procrastinate",
        brokers.Postgres,
        (
            *("procrastinate", "--app", f"{_PACKAGE}.procrastinate_jobs.app", "--log-level", "warning"),
            *("worker", "--concurrency", _AT_ONCE, "--delete-jobs", "successful"),
        ),
        "A concurrency of 64 with as many connections in the pool, and finished jobs deleted; PostgreSQL syncs each commit. "
        "The producer uses `batch_defer_async`, and a periodic task retries stalled jobs, as the documentation has it.",
        (
            "https://procrastinate.readthedocs.io/en/stable/howto/production/retry_stalled_jobs.html",
            "https://procrastinate.readthedocs.io/en/stable/howto/basics/worker.html",
            "https://procrastinate.readthedocs.io/en/stable/howto/basics/batch_defer.html",
        ),
        share=0.2,
    ),
    "taskiq": _taskiq(
        brokers.Redis,
        "`RedisStreamBroker`, the one with acknowledgements, in one process with 64 tasks at once on uvloop. It has no result backend.",
    ),
    "celery-everysec": _celery(brokers.RedisEverysec, "threads", _AT_ONCE, _LESS_DURABLE.format("`celery`")),
    "dramatiq-everysec": _dramatiq(brokers.RedisEverysec, _LESS_DURABLE.format("`dramatiq`")),
    "arq-everysec": _arq(brokers.RedisEverysec, _LESS_DURABLE.format("`arq`")),
    "rq-everysec": _rq(brokers.RedisEverysec, _LESS_DURABLE.format("`rq`")),
    "taskiq-everysec": _taskiq(brokers.RedisEverysec, _LESS_DURABLE.format("`taskiq`")),
}
