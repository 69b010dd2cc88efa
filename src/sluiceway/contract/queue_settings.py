"""A queue: its settings, each one entry, and the answers that show it.

An entry is a field of `QueueSettings`: its type, its default, its label, what it does, and how it is written. From the entries come the
settings that `queues.create` and `queues.update` take, with their checks; their texts in the OpenAPI document; the options of
`sluiceway queue create`, and the dashboard's form and table. `Settings` and `QueueInfo` repeat the names for type checkers; a test holds
them to the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec
from msgspec import Meta

from sluiceway.contract.fields import Answer, Duration, Incarnation, LogicalQueueCount, QueueName, ShortText, Time, about, one_of
from sluiceway.contract.rebalances import OpenRebalance, PartitionState
from sluiceway.kernel.clock import Millis, check_duration, format_duration
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import KEY_WINDOW, MAX_KEY_BYTES, MAX_LEASE_TIMEOUT, MAX_REQUEST_TIMEOUT, MAX_SCHEDULE, MIN_KEY_WINDOW
from sluiceway.kernel.names import check_queue_name, check_text

Verb = Literal["produce", "lease"]
LogicalQueues = int | Literal["auto"] | None
"""How many logical queues a queue has, on as many instances; None: one on each; `auto`: as many as its load takes."""
_MAX_COUNT: Final = 1_000_000_000
DEAD_SUFFIX: Final = "-dead"
"""The dead queue that is made with the queue `orders` is `orders-dead`."""


class RetryBackoff(msgspec.Struct, frozen=True):
    """Exponential back-off in milliseconds: `first` after the first attempt, doubled with each further attempt, `most` at most.

    Each delay is shortened by up to a fifth, so that items that failed at different moments do not come back at the same one.
    """

    first: Millis
    most: Millis

    def after(self, attempts: int, seed: int) -> Millis:
        """The delay after that many attempts (1 or more). `seed` is any number: the same one shortens the delay by the same part."""
        delay = min(self.most, self.first << min(attempts - 1, 40))
        # Multiplicative hashing (Knuth, The Art of Computer Programming, 6.4): neighbouring seeds give numbers far apart.
        part = seed * 2_654_435_761 % (1 << 32)
        return delay - (delay * part // 5 >> 32)


class Backoff(msgspec.Struct, frozen=True):
    """Exponential back-off as durations such as `1s`: `first` after the first attempt, doubled with each further one, `most` at most."""

    first: Annotated[Duration, Meta(description="Delay after the first attempt; each further attempt doubles it.")]
    most: Annotated[Duration, Meta(description="Longest delay.")]


class BackoffFields(Backoff, frozen=True, forbid_unknown_fields=True):
    """A `Backoff` in a call."""


class CircuitBreaker(msgspec.Struct, frozen=True):
    """When leasing pauses because most items fail: see docs/guides/operations.md, Circuit breaker."""

    failure_rate: Annotated[
        float, Meta(ge=0.01, le=0.99, description="Share of failed items that the queue tolerates in the long run, 0.01 to 0.99.")
    ]
    failures: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Number of failed items beyond that share that opens the breaker. As many failures in a row always open it.",
        ),
    ] = 20

    def __str__(self) -> str:
        return f"{self.failure_rate:g}:{self.failures}"


class CircuitBreakerFields(CircuitBreaker, frozen=True, forbid_unknown_fields=True):
    """A `CircuitBreaker` in a call."""


def read_circuit_breaker(text: str) -> CircuitBreaker:
    """Read a breaker as people type it: `0.5`, or `0.5:20` with the number of failures. Raises ValueError."""
    rate, colon, failures = text.partition(":")
    fields = {"failure_rate": rate.strip(), **({"failures": failures.strip()} if colon else {})}
    try:
        return msgspec.convert(fields, CircuitBreaker, strict=False)
    except msgspec.ValidationError:
        expected = "a share of failed items from 0.01 to 0.99, optionally with a number of failures, such as 0.5 or 0.5:20"
        raise ValueError(f"{text!r} is not a circuit breaker; expected {expected}") from None


class KeyRate(msgspec.Struct, frozen=True):
    """How many items of a key may be leased in a second, and how many at once after a pause."""

    per_second: Annotated[
        float, Meta(ge=0.001, le=1_000_000, description="Items of a key that may be leased in a second, in the long run.")
    ]
    burst: Annotated[int, Meta(ge=1, le=1_000_000, description="Items of a key that may be leased at once after a pause.")] = 1

    def __str__(self) -> str:
        return f"{self.per_second:g}:{self.burst}"


class KeyRateFields(KeyRate, frozen=True, forbid_unknown_fields=True):
    """A `KeyRate` in a call."""


class Rate(msgspec.Struct, frozen=True):
    """How many items of a queue may be leased in a second, and how many at once after a pause."""

    per_second: Annotated[
        float, Meta(ge=0.001, le=1_000_000, description="Items of the queue that may be leased in a second, in the long run.")
    ]
    burst: Annotated[int, Meta(ge=1, le=1_000_000, description="Items of the queue that may be leased at once after a pause.")] = 1

    def __str__(self) -> str:
        return f"{self.per_second:g}:{self.burst}"


class RateFields(Rate, frozen=True, forbid_unknown_fields=True):
    """A `Rate` in a call."""


def read_key_rate(text: str) -> KeyRate:
    """Read a rate as people type it: `10`, or `10:50` with the burst. Raises ValueError."""
    rate = read_rate(text)
    return KeyRate(rate.per_second, rate.burst)


def read_rate(text: str) -> Rate:
    """Read a rate as people type it: `10`, or `10:50` with the burst. Raises ValueError."""
    rate, colon, burst = text.partition(":")
    fields = {"per_second": rate.strip(), **({"burst": burst.strip()} if colon else {})}
    try:
        return msgspec.convert(fields, Rate, strict=False)
    except msgspec.ValidationError:
        expected = "items a second, at least 0.001, optionally with a burst of at least 1, such as 10 or 10:50"
        raise ValueError(f"{text!r} is not a rate; expected {expected}") from None


MAX_WEIGHTS: Final = 1_000


def read_key_weights(text: str) -> dict[str, int]:
    """Read weights as people type them: `big=5 small=1`. Raises ValueError."""
    found = {}
    for each in text.split():
        key, equals, weight = each.rpartition("=")
        if not equals or not weight.isascii() or not weight.isdigit():
            raise ValueError(f"{each!r} is not a key's weight; expected KEY=WEIGHT, such as tenant-a=5")
        found[key] = int(weight)
    return found


# -- how a setting is written -----------------------------------------------------------------------------------------

Kind = Literal["duration", "count", "queue", "backoff", "breaker", "logical queues", "word", "key rate", "rate", "key weights", "text"]
Unique = Literal["until_settled", "while_waiting"]


@dataclass(frozen=True)
class Form:
    """How a setting is written in calls and answers. `read` checks the value of a call, and raises `invalid_request`."""

    kind: Kind
    wire: Any
    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any] = lambda value: value


def _duration(least: Millis, most: Millis) -> Form:
    return Form("duration", Duration, lambda text, name: check_duration(text, name, least, most), format_duration)


def _read_backoff(given: Backoff, name: str) -> RetryBackoff:
    first = check_duration(given.first, f"{name}.first", 1, MAX_SCHEDULE)
    most = check_duration(given.most, f"{name}.most", 1, MAX_SCHEDULE)
    if first > most:
        raise invalid(f"{name}.first", f"{given.first!r} is longer than `most`, which is {given.most!r}")
    return RetryBackoff(first, most)


def _write_backoff(backoff: RetryBackoff) -> Backoff:
    return Backoff(format_duration(backoff.first), format_duration(backoff.most))


def _check_breaker(given: CircuitBreaker, name: str) -> CircuitBreaker:
    return CircuitBreaker(given.failure_rate, given.failures)


def _check_key_rate(given: KeyRate, name: str) -> KeyRate:
    return KeyRate(given.per_second, given.burst)


def _check_rate(given: Rate, name: str) -> Rate:
    return Rate(given.per_second, given.burst)


def _check_weights(given: dict[str, int], name: str) -> dict[str, int]:
    for key in given:
        if not key or len(key.encode()) > MAX_KEY_BYTES:
            raise invalid(name, f"{key[:20]!r} is no key of an item: they have 1 to {MAX_KEY_BYTES} bytes")
    return given


_COUNT: Final = Form("count", Annotated[int, Meta(ge=0, le=_MAX_COUNT)], lambda value, _: value)
_QUEUE: Final = Form("queue", QueueName, check_queue_name)
_BACKOFF: Final = Form("backoff", BackoffFields, _read_backoff, _write_backoff)
_BREAKER: Final = Form("breaker", CircuitBreakerFields, _check_breaker)
_LOGICAL: Final = Form("logical queues", LogicalQueueCount | Literal["auto"], lambda value, _: value)
_KEY_RATE: Final = Form("key rate", KeyRateFields, _check_key_rate)
_RATE: Final = Form("rate", RateFields, _check_rate)
_WEIGHTS: Final = Form(
    "key weights", Annotated[dict[str, Annotated[int, Meta(ge=1, le=100)]], Meta(max_length=MAX_WEIGHTS)], _check_weights
)
_BY_KEY: Final = Form("word", Literal["key"], lambda value, _: value)
_BLOCK: Final = Form("word", Literal["block"], lambda value, _: value)
_STRICT: Final = Form("word", Literal["strict"], lambda value, _: value)
_UNIQUE: Final = Form("word", Unique, lambda value, _: value)
_TEXT: Final = Form("text", ShortText, check_text)


@dataclass(frozen=True)
class Setting:
    """A setting: its name, what people call it, one sentence on what it does, and what its default stands for, if that is not plain.

    `new`: the value that a new queue gets if its call does not name the setting; None: the default.
    """

    name: str
    label: str
    about: str
    form: Form
    default: Any
    unset: str
    new: Any

    @property
    def can_be_off(self) -> bool:
        """Whether there is a way to go without it: its default."""
        return self.default is None or self.new is not None

    @property
    def new_text(self) -> str:
        """What a new queue gets, and what that stands for: `20`, `1s to 10m`, `none, dead items are dropped`."""
        if self.new is None:
            return self.default_text
        value = self.text(self.new)
        return f"{value.first} to {value.most}" if isinstance(value, Backoff) else str(value)

    @property
    def default_text(self) -> str:
        """The default with what it stands for: `1m`, `0 (no limit)`, `none, dead items are dropped`."""
        value = self.text(self.default)
        text = "" if value is None else str(value)
        return f"{text} ({self.unset})" if text and self.unset else text or self.unset

    def shown(self, value: Any) -> Any:
        """A value of an answer for people: what it stands for, if it is a default that is not plain."""
        return self.unset if self.unset and value == self.text(self.default) else value

    def read(self, value: Any) -> Any:
        """The value of a call; null is the default. Raises `invalid_request`."""
        return self.default if value is None else self.form.read(value, self.name)

    def text(self, value: Any) -> Any:
        """The value as calls and answers write it."""
        return None if value is None else self.form.write(value)


def _setting(label: str, about: str, form: Form, *, unset: str = "", new: Any = None) -> Meta:
    return Meta(extra={"label": label, "about": about, "form": form, "unset": unset, "new": new})


# -- the entries ------------------------------------------------------------------------------------------------------


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a queue as the server keeps them. Durations are in milliseconds."""

    lease_timeout: Annotated[
        Millis, _setting("Lease timeout", "Lease duration, unless a call requests its own.", _duration(1, MAX_LEASE_TIMEOUT))
    ] = 60_000
    max_lease_timeout: Annotated[
        Millis, _setting("Longest lease", "Longest lease duration that a call may request.", _duration(1, MAX_LEASE_TIMEOUT))
    ] = MAX_LEASE_TIMEOUT
    max_attempts: Annotated[
        int, _setting("Max attempts", "Leases that an item may use up before it becomes dead.", _COUNT, unset="no limit", new=20)
    ] = 0
    dead_queue: Annotated[
        QueueName | None,
        _setting(
            "Dead queue",
            "Queue that receives dead items. It must exist.",
            _QUEUE,
            unset="none, dead items are dropped",
            new=f"NAME{DEAD_SUFFIX}",
        ),
    ] = None
    expire_timeout: Annotated[
        Millis,
        _setting("Expiry", "Time after which an item that is not completed becomes dead.", _duration(0, MAX_SCHEDULE), unset="never"),
    ] = 0
    retry_backoff: Annotated[
        RetryBackoff | None,
        _setting(
            "Retry back-off",
            "Delay after an expired lease or an untimed retry: the first, doubled with each attempt, up to the longest; minus up to a "
            "fifth.",
            _BACKOFF,
            unset="none, a retry is due at once",
            new=RetryBackoff(1_000, 600_000),
        ),
    ] = None
    circuit_breaker: Annotated[
        CircuitBreaker | None,
        _setting(
            "Circuit breaker",
            "While most items fail, only probes are leased, and retries do not count as attempts.",
            _BREAKER,
            unset="none",
        ),
    ] = None
    idempotency_window: Annotated[
        Millis,
        _setting("Idempotency window", "How long an idempotency key is remembered, 10m to 1d.", _duration(MIN_KEY_WINDOW, KEY_WINDOW)),
    ] = KEY_WINDOW
    write_timeout: Annotated[
        Millis | None,
        _setting(
            "Write timeout",
            "Maximum duration of a commit. A longer one has an unknown outcome.",
            _duration(1, MAX_REQUEST_TIMEOUT),
            unset="the backend's",
        ),
    ] = None
    target_age: Annotated[
        Millis,
        _setting(
            "Target age",
            "Age of the next ready item above which the queue is reported as late (`problems.list`).",
            _duration(0, MAX_SCHEDULE),
            unset="none",
        ),
    ] = 0
    logical_queues: Annotated[
        LogicalQueues,
        _setting(
            "Logical queues",
            "Number of instances that serve the queue; auto: as many as its load requires.",
            _LOGICAL,
            unset="one on each instance",
        ),
    ] = None
    order: Annotated[
        Literal["key"] | None,
        _setting(
            "Order",
            "key: the items of a key are delivered in order, the next ones only when those before are settled.",
            _BY_KEY,
            unset="none, the oldest first",
        ),
    ] = None
    key_on_dead: Annotated[
        Literal["block"] | None,
        _setting(
            "Dead items of a key",
            "With `order`, block: an item that would become dead stays in front of its key, which waits until an operator runs, moves or "
            "deletes it.",
            _BLOCK,
            unset="none, the next item of the key goes on",
        ),
    ] = None
    fair: Annotated[
        Literal["key"] | None,
        _setting("Fairness", "key: keys whose items wait are served in turn.", _BY_KEY, unset="none"),
    ] = None
    priority: Annotated[
        Literal["strict"] | None,
        _setting(
            "Priority",
            "strict: items of higher priority (0 to 9) are leased first; with `fair`, those of the same key.",
            _STRICT,
            unset="none, the oldest first",
        ),
    ] = None
    key_weights: Annotated[
        dict[str, int] | None,
        _setting(
            "Weights of keys", "With `fair`: a key of weight 5 is served five times as much as one of weight 1.", _WEIGHTS, unset="1 each"
        ),
    ] = None
    key_concurrency: Annotated[
        int, _setting("Concurrency of a key", "Items of a key that may be leased at once.", _COUNT, unset="no limit")
    ] = 0
    key_rate: Annotated[
        KeyRate | None,
        _setting("Rate of a key", "Items of a key that may be leased in a second, and at once.", _KEY_RATE, unset="no limit"),
    ] = None
    concurrency: Annotated[int, _setting("Concurrency", "Items of the queue that may be leased at once.", _COUNT, unset="no limit")] = 0
    rate: Annotated[
        Rate | None, _setting("Rate", "Items of the queue that may be leased in a second, and at once.", _RATE, unset="no limit")
    ] = None
    unique: Annotated[
        Unique | None,
        _setting(
            "Unique items",
            "An item is not stored while there is one with its unique key: until_settled, or while_waiting and not leased.",
            _UNIQUE,
            unset="none, no item may have a unique key",
        ),
    ] = None
    reference: Annotated[str, _setting("Reference", "Free text, 2,048 bytes at most.", _TEXT, unset="none")] = ""

    def settings(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: getattr(self, name) for name in QUEUE_SETTINGS}

    def settings_text(self) -> dict[str, Any]:
        """All settings by name, as answers write them."""
        return {name: each.text(getattr(self, name)) for name, each in QUEUE_SETTINGS.items()}


def _entries() -> Mapping[str, Setting]:
    return {
        field.name: Setting(name=field.name, default=field.default, **field.type.__metadata__[-1].extra)
        for field in msgspec.structs.fields(QueueSettings)
    }


QUEUE_SETTINGS: Final = _entries()
"""By name, in the order in which people are shown them."""


def settings_of_new(queue_name: str) -> dict[str, Any]:
    """The settings that a new queue gets unless its call names them: failing items pause, end, and are kept.

    `dead` and `NAME-dead` are taken for dead queues, which need no dead queue, and no limit after which their items would be dropped.
    """
    found = {name: each.new for name, each in QUEUE_SETTINGS.items() if each.new is not None}
    if f"-{queue_name}".endswith(DEAD_SUFFIX):
        del found["max_attempts"], found["dead_queue"]
        return found
    return found | {"dead_queue": queue_name + DEAD_SUFFIX}


# -- for callers --------------------------------------------------------------------------------------------------------

_Time = str | timedelta | None
"""A duration as a text such as `500ms`, `30s`, `1h30m`, or a timedelta; None: the default."""


class Settings(TypedDict, total=False):
    """The settings of a queue as keyword arguments, as docs/reference/api.md explains them. One that is left out stays as it is."""

    lease_timeout: _Time
    max_lease_timeout: _Time
    max_attempts: int | None
    dead_queue: str | None
    expire_timeout: _Time
    retry_backoff: Backoff | None
    circuit_breaker: CircuitBreaker | None
    idempotency_window: _Time
    write_timeout: _Time
    target_age: _Time
    logical_queues: LogicalQueues
    order: Literal["key"] | None
    key_on_dead: Literal["block"] | None
    fair: Literal["key"] | None
    priority: Literal["strict"] | None
    key_weights: dict[str, int] | None
    key_concurrency: int | None
    key_rate: KeyRate | None
    concurrency: int | None
    rate: Rate | None
    unique: Unique | None
    reference: str | None


class Partition(Answer, frozen=True, kw_only=True):
    """A partition, and the instance that owns it. `state` is the recorded one; whether it serves is in `queue.stats`."""

    partition: int
    backend: str
    state: Annotated[
        str,
        one_of(PartitionState),
        about("`available`, `preparing` (not yet in use), `draining` (takes no new items, and is removed once it is empty) or `paused`."),
    ]
    parents: Annotated[list[int], about("Partitions that it replaces, whether or not they still exist.")] = []
    owner: Annotated[str | None, about("Instance that owns the partition; null: none at the moment.")] = None
    address: Annotated[str | None, about("The owner's URL; null: not known.")] = None


class QueueInfo(Answer, frozen=True, kw_only=True):
    """A queue and its settings. Durations are texts such as `1m`."""

    queue_name: QueueName
    incarnation: Incarnation
    created_at: Time
    updated_at: Annotated[Time, about("When its settings were last changed.")]
    version: Annotated[int, about("Number of changes of its settings.")] = 1
    lease_timeout: Duration
    max_lease_timeout: Duration = "30d"
    max_attempts: int
    dead_queue: QueueName | None = None
    expire_timeout: Duration = "0s"
    retry_backoff: Backoff | None = None
    circuit_breaker: CircuitBreaker | None = None
    idempotency_window: Duration = "1d"
    write_timeout: Duration | None = None
    target_age: Duration = "0s"
    logical_queues: LogicalQueueCount | Literal["auto"] | None = None
    order: Literal["key"] | None = None
    key_on_dead: Literal["block"] | None = None
    fair: Literal["key"] | None = None
    priority: Literal["strict"] | None = None
    key_weights: dict[str, int] | None = None
    key_concurrency: int = 0
    key_rate: KeyRate | None = None
    concurrency: int = 0
    rate: Rate | None = None
    unique: Unique | None = None
    reference: str = ""
    paused: Annotated[list[Annotated[str, one_of(Verb)]], about("The verbs that are paused.")] = []
    requested_partitions: Annotated[int, about("Number of partitions, without draining ones.")]
    partitions: Annotated[list[Partition], about("The queue's partitions.")]
    rebalance: Annotated[OpenRebalance | None, about("The open rebalance; null: none.")] = None


class QueuePage(Answer, frozen=True, kw_only=True):
    """Some queues, by name."""

    items: Annotated[list[QueueInfo], about("The queues of this page.")]
    next: Annotated[QueueName | None, about("The pivot of the next page; null on the last.")] = None
