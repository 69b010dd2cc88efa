"""What a worker is told to do, in a form that is passed on to its processes."""

from __future__ import annotations

import msgspec

from sluiceway.client.consumer_common import SHUTDOWN_TIMEOUT
from sluiceway.client.http_exchange import DEFAULT_URL


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`concurrency`: handlers at once in each of the `processes`. `batch_size`: items that a handler gets as a list; None: one item.
    With `tables`, it gets a `LeasedTable` of up to `batch_size` items (10,000) instead.

    `listen`: host and port of the health and metrics endpoints; None: no endpoints. `reload`: start anew when a Python file below the
    current directory changes. The others are those of `Client` and `Client.consumer`.
    """

    queue_name: str
    concurrency: int = 8
    batch_size: int | None = None
    tables: bool = False
    processes: int = 1
    prefetch: int = 100
    ordered: bool = False
    lease_timeout: str = "1m"
    shutdown_timeout: str = SHUTDOWN_TIMEOUT
    error_messages: bool = True
    listen: tuple[str, int] | None = None
    reload: bool = False
    url: str = DEFAULT_URL
    client_id: str | None = None
    api_key: str | None = None
    ca_file: str | None = None
    log_level: str = "info"
    log_json: bool = False
