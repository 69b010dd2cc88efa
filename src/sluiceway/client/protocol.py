"""The code that all calls share: encoding of fields, decoding of errors, and the rules for repeats. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Generic, NamedTuple, TypeVar, cast

import msgspec

from sluiceway.client import answers
from sluiceway.client.errors import CallError
from sluiceway.kernel.clock import Millis, format_duration, parse_duration
from sluiceway.kernel.errors import KINDS, ErrorKind, invalid

T = TypeVar("T")
S = TypeVar("S")
Duration = str | timedelta
"""`500ms`, `30s`, `1h30m`, or a timedelta."""

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
DEFAULT_REQUEST_TIMEOUT: Millis = 30_000
"""The server's default for `request_timeout`. The client's own timeout is derived from it."""

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0


class About(NamedTuple):
    """The subject of a call, from which its instance is chosen. `takes`: the call is a lease, which any instance may serve."""

    queue_name: str
    ids: Sequence[str] = ()
    numbers: Sequence[int] = ()
    takes: bool = False

    def partitions(self) -> set[int | None]:
        """The partitions of `ids`, and those in `numbers`. None stands for a malformed id."""
        return {*self.numbers, *map(_partition_of, self.ids)}


def _partition_of(id_: str) -> int | None:
    parts = id_.split(".", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() else None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and how to read its answer.

    `repeatable` promises that sending it twice has the effect of sending it once. `request_timeout` is how long the server may take.
    """

    path: str
    body: bytes
    read: Callable[[bytes], T]
    repeatable: bool
    request_timeout: Millis = DEFAULT_REQUEST_TIMEOUT
    content_type: str = JSON
    accept: str = JSON
    about: About | None = None
    rekey: Callable[[str], Call[T]] | None = None
    """Makes the same call with another key. Only for calls with a generated key."""

    def as_arrow(self, read: Callable[[bytes], S]) -> Call[S]:
        """The same request, answered as an Arrow stream."""
        return Call(self.path, self.body, read, self.repeatable, self.request_timeout, self.content_type, ARROW, self.about)


def backoff(failures: int, roll: float) -> float:
    """Seconds to wait after a failure that follows `failures` others, jittered by `roll` (0 to 1)."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 20)) * (0.5 + roll / 2)


class Repeats:
    """Decides whether to repeat a failed call, and after what pause.

    A temporary refusal (nothing was done) is repeated for every call, an unknown outcome only for repeatable calls. A `Retry-After` from
    the server is obeyed.
    """

    def __init__(self, call: Call[T], retry_for: float, started: float) -> None:
        self._repeatable = call.repeatable
        self._give_up_at = started + retry_for
        self._failures = 0
        self._in_doubt = False

    def pause(self, error: CallError, now: float, roll: float) -> float:
        """Seconds until the next attempt, growing and jittered by `roll` (0 to 1). Raises the error that ends the call."""
        # The jitter comes on top of the server's `Retry-After`, which many clients received at once.
        pause = (error.retry_after or 0) / 1000 + backoff(self._failures, roll)
        self._failures += 1
        may_repeat = error.retryable and (self._repeatable or not error.outcome_unknown)
        if not may_repeat or now + pause >= self._give_up_at:
            raise self._verdict(error) from error.__cause__
        self._in_doubt = self._in_doubt or error.outcome_unknown
        return pause

    def next(self, call: Call[T], new_key: Callable[[], str]) -> Call[T]:
        """The call to send after the pause. It gets a new key if the key is generated and no attempt can have taken effect.

        A key belongs to one partition, which may be unavailable while others are available.
        """
        return call if self._in_doubt or call.rekey is None else call.rekey(new_key())

    def _verdict(self, error: CallError) -> CallError:
        # If the last attempt did nothing, an earlier one may still have taken effect.
        if not self._in_doubt or error.outcome_unknown:
            return error
        detail = f"{error.detail}; an earlier attempt of this call may have taken effect"
        if error.retryable:
            return CallError("outcome_unknown", detail, None, error.request_id)
        return CallError(error.code, detail, error.field, error.request_id, error.kind, error.ignored, error.retry_after)


class _Problem(msgspec.Struct):
    code: str
    title: str = ""
    detail: str = ""
    retryable: bool = False
    field: str | None = None
    request_id: str | None = None
    ignored: list[answers.Ignored] = []


def read_problem(status: int, body: bytes, wait: str | None = None) -> CallError:
    """The error for an answer with an HTTP error status. An answer that is not a problem document came from a proxy.

    `wait` is the Retry-After header. Only seconds are supported: a date would depend on two clocks.
    """
    retry_after = int(wait) * 1000 if wait is not None and wait.isascii() and wait.isdigit() and len(wait) < 8 else None
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        where = f"the answer is HTTP {status}, not from a Sluiceway server"
        if status == 429:
            return CallError("too_many_requests", f"{where}: a proxy limits requests", retry_after=retry_after)
        if status == 408 or status >= 500:
            # Such as 500 of an overloaded nginx, or 52x of a CDN. Whether the server got the call, a proxy does not say.
            return CallError("outcome_unknown", f"{where}: a proxy gave up", retry_after=retry_after)
        return CallError("not_found", f"{where}; check the URL")
    kind = ErrorKind(status, problem.retryable, problem.title)
    detail = problem.detail or problem.title
    return CallError(problem.code, detail, problem.field, problem.request_id, kind, problem.ignored, retry_after)


def unreadable(reason: Exception) -> CallError:
    """The error for an unreadable answer with a success status. The call may have taken effect."""
    kind = ErrorKind(200, False, KINDS["outcome_unknown"].title)
    return CallError("outcome_unknown", f"the answer cannot be read ({reason}); check that the URL is a Sluiceway server's", kind=kind)


# -- encoding of fields -----------------------------------------------------------------------------------------------


def millis(duration: Duration, field: str) -> Millis:
    if isinstance(duration, timedelta):
        return round(duration.total_seconds() * 1000)
    return parse_duration(duration, field)


def duration_text(duration: Duration | None) -> str | None:
    return format_duration(millis(duration, "duration")) if isinstance(duration, timedelta) else duration


def time_text(at: datetime | None, field: str) -> str | None:
    if at is None:
        return None
    if at.tzinfo is None:
        raise invalid(field, "the time has no time zone; use datetime.now(UTC) or .astimezone()")
    return at.isoformat()


def given(**fields: object) -> dict[str, object]:
    """The fields that are not None. The server applies its default to an absent field."""
    return {name: value for name, value in fields.items() if value is not None}


def listed(values: Iterable[T], field: str) -> list[T]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        kind = "one text" if isinstance(values, str | bytes) else type(values).__name__
        raise invalid(field, f"expected a list, not {kind}")
    return list(values)


def call(
    path: str,
    answer: type[T],
    fields: Mapping[str, object],
    *,
    repeatable: bool = True,
    request_timeout: Duration | None = None,
    about: About | None = None,
) -> Call[T]:
    body = dict(fields)
    wait = DEFAULT_REQUEST_TIMEOUT
    if request_timeout is not None:
        wait = millis(request_timeout, "request_timeout")
        body["request_timeout"] = duration_text(request_timeout)
    return Call(path, msgspec.json.encode(body), decoder(answer).decode, repeatable, wait, about=about)


_decoders: dict[type, object] = {}


def decoder(answer: type[T]) -> msgspec.json.Decoder[T]:
    if answer not in _decoders:
        _decoders[answer] = msgspec.json.Decoder(answer)
    return cast("msgspec.json.Decoder[T]", _decoders[answer])
