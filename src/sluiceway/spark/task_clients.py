"""Clients for the calls of Spark's tasks, which keep their connections from one task to the next.

A Spark worker is a process that runs one task after the other. A new connection costs a task two round trips, with TLS three or four and
some milliseconds of processor time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import TaskContext

from sluiceway.spark.options import Server
from sluiceway.spark.server_calls import Client

MAX_KEPT = 8
"""Clients that a worker keeps between tasks: one for each queue and set of options that its tasks use."""

_kept: dict[Server, Client] = {}


@contextmanager
def client_of_task(server: Server) -> Iterator[Client]:
    """A client for the block. In a task it is kept for the worker's next task with this server; elsewhere it is closed.

    A client is also closed if the block fails. So certificates that were replaced are read anew after the first failure.
    """
    client = _kept.pop(server, None) or Client(server)
    try:
        yield client
    except BaseException:
        client.close()
        raise
    if TaskContext.get() is None:
        client.close()
        return
    _kept[server], old = client, _kept.pop(server, None)
    if len(_kept) > MAX_KEPT:
        old = _kept.pop(next(iter(_kept)))
    if old is not None:
        old.close()
