"""Resident capture: one Spark job of endless tasks, each a member of a capture that hands records on to a queue.

Spark restarts a task whose process has died, which is all that a member needs: everything else is in the log. Each task holds a *leash*, a
connection to the driver, so that it can leave in order when the driver wants it to, or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pyspark import InheritableThread, TaskContext

from sluiceway.capture import CaptureConfig, check, open_stream, run_member
from sluiceway.kernel.errors import SluicewayError, invalid

if TYPE_CHECKING:
    from types import TracebackType

    from pyspark.sql import SparkSession

log = logging.getLogger("sluiceway.spark")

MIN_FAILURES = 1_000
"""Minimum failure limit: tasks die now and then over the job's life, and Spark counts failures over all of it."""
_FAILURES = 1_000_000
_NONCE = 32
_GREETING = 10.0
"""Seconds for a task to identify itself."""
_LINE = 200
"""Maximum bytes of that identification."""
_DETAIL = 2_000
_MOST = 32_768
"""Maximum characters of a task's error detail, and bytes of its report: JSON takes up to twelve for a character."""
_AGAIN = 1.0
"""Seconds before a task that could not begin is retried."""
_LEAVE = 40.0
"""Seconds for the tasks to leave in order: more than a member takes."""
_CANCEL = 20.0
"""Seconds for Spark to end them otherwise."""
_GLANCE = 0.1
_NOBODY = 3.0
"""Seconds without any task after which none is waited for."""
_ELSEWHERE = frozenset(("api_key", "apiKey", "caFile", "dsn_env", "dsn_file"))
"""Options that refer to something needed only where the tasks run."""


class Present(NamedTuple):
    """A running task: its number in the job, its attempt, and the host and process id of its Python worker."""

    task: int
    attempt: int
    host: str
    pid: int


# ---- session -----------------------------------------------------------------------------------------------------------


def settings(tasks: int) -> dict[str, object]:
    """Settings of a local session for that many resident tasks, for `session(…, **settings(tasks))`.

    One slot more than tasks, for the driver's other work.
    """
    return {
        "spark.master": f"local[{tasks + 1},{_FAILURES}]",
        "spark.task.maxFailures": _FAILURES,
        "spark.speculation": False,
        "spark.python.worker.reuse": False,
        "spark.excludeOnFailure.enabled": False,
    }


def check_before(config: CaptureConfig, conf: Mapping[str, object], tasks: int) -> None:
    """Check what can be checked before a session with these settings exists. Raises SluicewayError.

    If the tasks run on other machines, these machines' environment is for the tasks to check.
    """
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in conf.items()}
    check_session(texts.get, tasks)
    elsewhere = frozenset[str]() if texts.get("spark.master", "local").startswith("local") else _ELSEWHERE
    for known in (_check_stream, check):
        try:
            asyncio.run(known(config))
        except SluicewayError as error:
            if error.field not in elsewhere:
                raise


async def _check_stream(config: CaptureConfig) -> None:
    await open_stream(config.stream, config.name, config.options).close()


def check_session(conf: Callable[[str], str | None], tasks: int) -> None:
    """Raises `invalid_request` that names a setting with which the job would end, hang, or have fewer members than tasks.

    `conf` returns a setting's value by its full name, or None.
    """
    master = conf("spark.master") or ""
    local = re.fullmatch(r"local(?:\[(\d+|\*)(?:,\s*(\d+))?\])?", master)
    if local is not None:
        if int(local[2] or 1) < MIN_FAILURES:
            raise invalid("spark.master", f"{master} ends the job when a task fails; use local[{tasks + 1},{_FAILURES}]")
        slots = os.cpu_count() or 1 if local[1] == "*" else int(local[1] or 1)
        _check_slots(slots, tasks, "spark.master")
    else:
        failures = conf("spark.task.maxFailures") or "4"
        if not failures.isdigit() or int(failures) < MIN_FAILURES:
            raise invalid(
                "spark.task.maxFailures", f"{failures} ends the job after this many failures of a task; use at least {MIN_FAILURES}"
            )
        _check_slots(_slots(conf), tasks, "spark.executor.instances")
    for name, default in (
        ("spark.speculation", "false"),
        ("spark.excludeOnFailure.enabled", "false"),
        ("spark.python.worker.reuse", "true"),
    ):
        if (conf(name) or default).lower() != "false":
            raise invalid(name, "must be false for tasks that never end")


def _slots(conf: Callable[[str], str | None]) -> int | None:
    """Number of concurrent tasks in a cluster; None: variable."""
    instances, cores = conf("spark.executor.instances"), conf("spark.executor.cores")
    if instances is None or cores is None or (conf("spark.dynamicAllocation.enabled") or "false").lower() == "true":
        return None
    return int(instances) * (int(cores) // int(conf("spark.task.cpus") or 1))


def _check_slots(slots: int | None, tasks: int, name: str) -> None:
    if slots is not None and slots < tasks:
        raise invalid(name, f"{tasks} tasks need {tasks} slots, and there are {slots}; the other tasks would never start")


# ---- leash -------------------------------------------------------------------------------------------------------------


class Leash:
    """The driver's end of the leash: knows the running tasks, and tells them to leave. Task input is trusted only as far as the count of
    tasks."""

    def __init__(self, host: str, news: threading.Event, bind: str | None = None) -> None:
        """`host`: where tasks find the driver; `bind`: its own address, if different. `news` is set when a task has failed.

        Raises `invalid_request`.
        """
        self._socket = _listening(bind or host)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        self.nonce = secrets.token_hex(_NONCE // 2)
        self._lock = threading.Lock()
        self._present: dict[socket.socket, Present] = {}
        self._dropped = self._closed = False
        self.failed: SluicewayError | None = None
        """The first permanent error of a task, which a retry would not mend."""
        self.trouble = ""
        """The last temporary error of a task."""
        self.news = news
        threading.Thread(target=self._accept, name="sluiceway-leash", daemon=True).start()

    @property
    def present(self) -> list[Present]:
        with self._lock:
            return sorted(self._present.values())

    def drop(self) -> None:
        """Tell all tasks to leave, including later ones."""
        with self._lock:
            self._dropped = True
            connections = list(self._present)
        for connection in connections:
            with contextlib.suppress(OSError):
                # The task's half stays open until it has left.
                connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._closed = True
        self.drop()
        with contextlib.suppress(OSError):
            # Closing alone does not wake the thread in `accept`.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                # For instance too many open files: keep accepting, as no other thread does. This thread has no other work, so it may sleep.
                log.warning("a task could not join: %s", error)
                time.sleep(_AGAIN)
                continue
            threading.Thread(target=self._hold, args=(connection,), name="sluiceway-leash-task", daemon=True).start()

    def _hold(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_GREETING)
            lines = connection.makefile("rb")
            present = _greeted(lines.readline(_LINE), self.nonce)
            if present is None:
                return
            with self._lock:
                if self._dropped:
                    return
                self._present[connection] = present
            try:
                connection.settimeout(None)
                self._hear(lines.readline(_MOST))
            finally:
                with self._lock:
                    del self._present[connection]

    def _hear(self, line: bytes) -> None:
        """Record a task's final error, if it sent one."""
        # A partial line, from a killed task, is ignored.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = json.loads(line)
            error = SluicewayError(told["code"], told["detail"], told["field"])
            if error.retryable:
                self.trouble = error.detail
                return
            self.failed = self.failed or error
            self.news.set()


def _listening(address: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, 0), family=family)
    except OSError as error:
        raise invalid(
            "spark.driver.host", f"tasks connect to it, and the driver cannot listen at {address}: {error}; see spark.driver.bindAddress"
        ) from None


def _greeted(line: bytes, nonce: str) -> Present | None:
    """The task that identifies itself; None: an unknown peer."""
    words = line.decode("ascii", "replace").split()
    if len(words) != 5 or not secrets.compare_digest(words[0].encode(), nonce.encode()) or not all(words[n].isdigit() for n in (1, 2, 4)):
        return None
    return Present(int(words[1]), int(words[2]), words[3], int(words[4]))


class _Member:
    """The function of a task, sent to the executors."""

    def __init__(self, config: CaptureConfig, address: tuple[str, int], nonce: str) -> None:
        self._config, self._address, self._nonce = config, address, nonce

    def __call__(self, number: int, _: Iterable[object]) -> Iterator[int]:
        context = TaskContext.get()
        asyncio.run(self._run(number, context.attemptNumber() if context is not None else 0))
        return iter((number,))

    async def _run(self, number: int, attempt: int) -> None:
        """Run a member until the driver drops the leash, or is gone. Permanent errors are reported to the driver; Spark retries any
        others."""
        try:
            reader, writer = await asyncio.open_connection(*self._address)
        except OSError as error:
            # No leash could ever end this task.
            await asyncio.sleep(_AGAIN)
            where = f"{self._address[0]}:{self._address[1]}"
            raise SluicewayError("unavailable", f"task {number} cannot reach the driver at {where}: {error}") from None
        leash = asyncio.ensure_future(_let_go(reader))
        # The driver's machine may vanish silently, and the driver itself sends nothing.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            writer.write(f"{self._nonce} {number} {attempt} {socket.gethostname()[:80]} {os.getpid()}\n".encode("ascii", "replace"))
            await self._take_part(leash, f"task-{number}-{attempt}")
        except SluicewayError as error:
            told = {"code": error.code, "detail": error.detail[:_DETAIL], "field": error.field}
            writer.write(json.dumps(told).encode() + b"\n")
            await asyncio.wait((leash,), timeout=_AGAIN if error.retryable else None)
            # If released, end successfully: otherwise Spark restarts the task, and the job cannot end.
            if not leash.done():
                raise
        finally:
            leash.cancel()
            writer.close()

    async def _take_part(self, leash: asyncio.Future[None], name: str) -> None:
        stop = asyncio.Event()
        member = asyncio.ensure_future(run_member(self._config, stop=stop, name_hint=name))
        try:
            await asyncio.wait((leash, member), return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            await member
        finally:
            member.cancel()
            await asyncio.wait((member,))


async def _let_go(reader: asyncio.StreamReader) -> None:
    """Wait for the driver to end the connection; it sends nothing."""
    with contextlib.suppress(ConnectionError):
        await reader.read(1)


# ---- job ---------------------------------------------------------------------------------------------------------------


class Resident:
    """The job, from start to end; also a context manager, which stops it.

    `session` must have the settings of `settings`. Raises `invalid_request` that names a wrong one.
    """

    def __init__(self, session: SparkSession, config: CaptureConfig, tasks: int) -> None:
        if tasks < 1:
            raise invalid("tasks", "expected at least 1")
        if not config.queue:
            raise invalid("queue", "required: the queue that receives the records, and its server's url")
        self._context = session.sparkContext
        conf = self._context.getConf()
        check_session(lambda name: conf.get(name), tasks)
        self.config, self.tasks = config, tasks
        self._news = threading.Event()
        """The job is over, or will not go on."""
        self._leash = Leash(conf.get("spark.driver.host") or socket.gethostname(), self._news, conf.get("spark.driver.bindAddress"))
        self._group = f"sluiceway-capture-{config.name}-{self._leash.nonce[:8]}"
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._stopping = False
        InheritableThread(target=self._run, name="sluiceway-capture-job", daemon=True).start()

    @property
    def present(self) -> list[Present]:
        """The running tasks."""
        return self._leash.present

    @property
    def trouble(self) -> str:
        """Why the last failed task ended; it is restarted."""
        return self._leash.trouble

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds. Returns whether the job is over.

        Raises SluicewayError for a task's permanent error, or if Spark has ended the job.
        """
        if not self._news.wait(timeout):
            return False
        if self._leash.failed is not None:
            raise self._leash.failed
        if self._error is not None and not self._stopping:
            raise SluicewayError("internal", f"Spark ended the job: {_first_line(self._error)}") from self._error
        return True

    def stop(self) -> None:
        """Let the tasks leave in order. Slow ones are ended by Spark; their partitions wait until the members are considered dead."""
        self._stopping = True
        self._leash.drop()
        if not self._leave():
            if present := self.present:
                log.warning("%d tasks did not stop in time and are cancelled", len(present))
            self._context.cancelJobGroup(self._group)
            self._over.wait(_CANCEL)
        self._leash.close()

    def _leave(self) -> bool:
        """Whether the job is over in time. Gives up early if no task is present: tasks that cannot begin do not leave, either."""
        seen = began = time.monotonic()
        while not self._over.wait(_GLANCE):
            now = time.monotonic()
            seen = now if self.present else seen
            if now - seen >= _NOBODY or now - began >= _LEAVE:
                return False
        return True

    def __enter__(self) -> Resident:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self._group, f"capture {self.config.name}", interruptOnCancel=True)
            member = _Member(self.config, self._leash.address, self._leash.nonce)
            self._context.parallelize(range(self.tasks), self.tasks).mapPartitionsWithIndex(member).count()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()
            self._news.set()


def _first_line(error: BaseException) -> str:
    """The text of a task's own error, if there is one; Spark's message contains its whole traceback."""
    text = str(error)
    own = re.findall(r"(?m)^(?:\S*\.)?SluicewayError: (.*)$", text)
    lines = own or text.strip().splitlines() or [type(error).__name__]
    return lines[-1 if own else 0][:500]
