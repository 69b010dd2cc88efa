"""What both consumers share: checks of their options, and the exceptions with which a handler chooses an item's outcome."""

from __future__ import annotations

import inspect
import logging
import socket
import traceback
from collections.abc import Container, Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import Any

from sluiceway.client.answers import LeasedItem
from sluiceway.client.item_calls import Retry
from sluiceway.client.lease_manager import DONE, LeaseManager, Outcome
from sluiceway.client.protocol import Duration, duration_text, millis
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_LEASE_TIMEOUT, MAX_SCHEDULE, MAX_TEXT_BYTES, MAX_TRACE_BYTES

log = logging.getLogger("sluiceway.client")

SHUTDOWN_TIMEOUT = "25s"
"""How long a stopped consumer lets handlers finish. Kubernetes kills a process after 30 s: the rest is released before that."""
MIN_LEASE_TIMEOUT = 300
"""In milliseconds. A lease is extended once a third of it has passed, and the extension needs time."""


class RetryItem(Exception):
    """Raised by a handler to put the item back. It is offered again `after` this time, by default as the queue's `retry_backoff` says."""

    def __init__(self, after: Duration | None = None, reason: str | None = None) -> None:
        super().__init__(reason or "the item is put back")
        if after is not None and not 0 <= millis(after, "after") <= MAX_SCHEDULE:
            raise invalid("after", f"expected 0s to {MAX_SCHEDULE // 86_400_000}d")
        self.after = after
        self.reason = reason


class DeadItem(Exception):
    """Raised by a handler to send the item to the dead queue with this reason. Without a dead queue the item is dropped."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def put_back(item_id: str, error: BaseException, error_messages: bool = True) -> Retry:
    """The outcome for a handler's exception. Other exceptions than ours are recorded by type, message and trace, or by type alone."""
    if isinstance(error, DeadItem):
        return Retry(item_id, dead=True, reason=_text_of(error.reason), host=_host())
    if isinstance(error, RetryItem):
        return Retry(item_id, retry_after=duration_text(error.after), reason=_text_of(error.reason), host=_host())
    if not error_messages:
        return Retry(item_id, reason=_short(type(error).__name__), host=_host())
    return Retry(item_id, reason=_short(_describe(error)), trace=trace_of(error), host=_host())


@cache
def _host() -> str:
    return _short(socket.gethostname())


def _from_the_handler(error: BaseException) -> TracebackType | None:
    """The exception's trace without the frames of this package; None if it has no others."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        trace = trace.tb_next
    return trace


def logged_error(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """`exc_info` of a log record for a handler's exception: its trace begins in the handler."""
    return type(error), error, _from_the_handler(error) or error.__traceback__


def trace_of(error: BaseException) -> str | None:
    """The last lines of the exception's trace, MAX_TRACE_BYTES at most, from the handler on."""
    trace = _from_the_handler(error)
    if trace is None:
        return None
    lines = traceback.format_exception(type(error), error, trace)
    return "".join(lines).rstrip("\n").encode("utf-8", "replace")[-MAX_TRACE_BYTES:].decode("utf-8", "ignore")


_OURS = ("sluiceway", "asyncio", "concurrent")
"""Packages between a consumer and its handler."""


def _describe(error: BaseException) -> str:
    """`ValueError: no such customer`, on one line."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = ""
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def _text_of(reason: object) -> str | None:
    """A reason as a text. Handlers also pass the exception that they have caught, whatever the annotation says."""
    if reason is None or isinstance(reason, str):
        return None if reason is None else _short(reason)
    if isinstance(reason, BaseException):
        return _short(_describe(reason))
    try:
        return _short(str(reason))
    except Exception:
        return type(reason).__name__


def check_returned(returned: object) -> None:
    """Raises TypeError for what a handler returns if it was not carried out, or if it should have raised it."""
    if inspect.isawaitable(returned) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise TypeError(f"the handler returned a {type(returned).__name__}, which was not run: use `async def` without `yield`")
    if isinstance(returned, RetryItem | DeadItem):
        raise TypeError(f"the handler returned a {type(returned).__name__}; raise it")


def batch_outcomes(items: Sequence[LeasedItem], returned: object) -> dict[str, Outcome]:
    """The outcomes of a batch whose handler returned normally: those that it named, and DONE for the others.

    Raises TypeError if a mapping names an item that is not of the batch, or another outcome than `RetryItem` and `DeadItem`.
    """
    check_returned(returned)
    outcomes: dict[str, Outcome] = dict.fromkeys((item.id for item in items), DONE)
    if isinstance(returned, Mapping):
        outcomes.update(named_outcomes(outcomes, returned))
    return outcomes


def named_outcomes(ids: Container[str], returned: Mapping[Any, object]) -> dict[str, Retry]:
    """The outcomes in what a handler of several items returned. Raises TypeError for other ids than these, and other outcomes than ours."""
    outcomes = {}
    for item_id, outcome in returned.items():
        if item_id not in ids or not isinstance(outcome, RetryItem | DeadItem):
            raise TypeError(f"a handler returns ids of its items with a RetryItem or DeadItem each, not {item_id!r}: {outcome!r}")
        outcomes[item_id] = put_back(item_id, outcome)
    return outcomes


def _short(reason: str) -> str:
    return reason.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")


def used_twice() -> SluicewayError:
    return invalid("consumer", "it was already used; create another one")


def not_in_a_block() -> SluicewayError:
    return invalid("consumer", "iterate over a consumer in a `with` (`async with`) block, so that it can release its items at the end")


def tell_problem(queue_name: str, before: str | None, error: SluicewayError | None) -> None:
    """Log when lease calls begin to fail, and when one succeeds again. `before`: why the previous one failed, if it did."""
    if error is not None and error.code == "queue_not_found":
        # Also after another problem: a worker may start before the server, and that before its queues are created.
        if before != error.detail:
            hint = f"create it with `sluiceway queue create {queue_name}`, or correct the name"
            log.warning("queue %s: the queue does not exist: %s. The consumer keeps trying", queue_name, hint)
    elif before is None and error is not None:
        log.warning("queue %s: no items can be leased: %s. The consumer keeps trying", queue_name, error.detail)
    elif before is not None and error is None:
        log.warning("queue %s: items can be leased again", queue_name)


def shutdown_millis(shutdown_timeout: Duration) -> Millis:
    found = millis(shutdown_timeout, "shutdown_timeout")
    if not 0 <= found <= MAX_LEASE_TIMEOUT:
        raise invalid("shutdown_timeout", f"expected 0s to {MAX_LEASE_TIMEOUT // 86_400_000}d")
    return found


def check_concurrency(concurrency: int) -> None:
    if concurrency < 1:
        raise invalid("concurrency", "expected at least 1")


def check_batch_size(batch_size: int) -> None:
    if not 1 <= batch_size <= MAX_ITEMS_ARROW:
        raise invalid("batch_size", f"expected 1 to {MAX_ITEMS_ARROW}")


def new_lease_manager(
    prefetch: int, lease_timeout: Duration, linger: Duration, patience: float, wait_for_queue: bool = False, ordered: bool = False
) -> LeaseManager:
    """Raises `invalid_request`, which names the option."""
    if not 0 <= prefetch <= MAX_ITEMS_ARROW:
        raise invalid("prefetch", f"expected 0 to {MAX_ITEMS_ARROW}")
    lease_millis = millis(lease_timeout, "lease_timeout")
    if not MIN_LEASE_TIMEOUT <= lease_millis <= MAX_LEASE_TIMEOUT:
        raise invalid("lease_timeout", f"expected {MIN_LEASE_TIMEOUT}ms to {MAX_LEASE_TIMEOUT // 86_400_000}d")
    return LeaseManager(1, prefetch, lease_millis, millis(linger, "linger"), round(patience * 1000), wait_for_queue, ordered)
