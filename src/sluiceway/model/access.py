"""Access control: callers, scopes and API keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple, cast, get_args

import msgspec

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_KEY_RATE, MAX_KEY_SCOPES, MAX_KEY_TIMEOUT, MIN_ADMIN_KEY
from sluiceway.kernel.names import QUEUE_NAME, QUEUE_PATTERN

Action = Literal["produce", "consume", "read", "manage", "admin"]
"""`consume`: lease, extend and settle. `read`: read without changing. `manage`: change queues as a whole.
`admin`: keys, configuration, audit."""
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)

_ON_QUEUES: Final = ", ".join(action for action in ACTIONS if action != "admin")
_EXPECTED: Final = f"expected admin, or ACTION:PATTERN such as produce:orders-*, where ACTION is one of {_ON_QUEUES}"


class Actor(NamedTuple):
    """Author of a change, for the audit trail: the name of the caller's key, and the request's id."""

    name: str
    request_id: str = ""


SYSTEM: Final = Actor("system")


@dataclass(frozen=True, slots=True)
class Scope:
    """One right: an action on the queues whose name matches `pattern`, in which `*` stands for any text.

    `admin` is a separate right without a pattern: no pattern and no other action includes it, nor does it include any other.
    """

    action: Action
    pattern: str = "*"

    def covers(self, action: Action, queue_name: str) -> bool:
        return self.action == action and fnmatchcase(queue_name, self.pattern)

    def __str__(self) -> str:
        return self.action if self.action == "admin" else f"{self.action}:{self.pattern}"


def parse_scope(text: object, field: str) -> Scope:
    """Parse `admin` or `ACTION:PATTERN`; `str` of the scope is the text again. Raises `invalid_request`, naming `field`."""
    if text == "admin":
        return Scope("admin")
    if not isinstance(text, str):
        raise invalid(field, _EXPECTED)
    action, colon, pattern = text.partition(":")
    if action not in ACTIONS or action == "admin" or not colon:
        raise invalid(field, f"{text[:80]!r} is not a scope; {_EXPECTED}")
    return Scope(cast(Action, action), check_pattern(pattern, field))


def check_pattern(pattern: str, field: str) -> str:
    """Return the pattern if it is a valid pattern of queue names. Raises `invalid_request`, naming `field`."""
    if not QUEUE_PATTERN.fullmatch(pattern):
        raise invalid(field, f"{pattern[:80]!r} is not a pattern of queue names: 1 to 128 of A-Z a-z 0-9 _ . - and * (any text)")
    return pattern


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request. `scopes` None: all rights, because authentication is off.

    `key_id`: id of the caller's API key, or empty.
    """

    name: str
    scopes: tuple[Scope, ...] | None = None
    key_id: str = ""

    def may(self, action: Action, queue_name: str = "") -> bool:
        if self.scopes is None:
            return True
        if action == "admin":
            return any(scope.action == "admin" for scope in self.scopes)
        return any(scope.covers(action, queue_name) for scope in self.scopes)

    def may_all(self, action: Action) -> bool:
        """Whether the caller has the right on all present and future queues."""
        return self.scopes is None or any(scope.action == action and not scope.pattern.strip("*") for scope in self.scopes)

    def require(self, action: Action, queue_name: str = "") -> None:
        """Raise `forbidden` without the right. Call it before the queue is looked up, so that the answer does not reveal whether it exists.

        A pattern in place of a name asks for all queues that match it: only a `*` of a scope matches the pattern's.
        """
        if not self.may(action, queue_name):
            where = f" on queue {queue_name[:128]!r}" if queue_name else ""
            needed = Scope(action, queue_name[:128] or "*")
            raise SluicewayError("forbidden", f"this key may not {action}{where}; use one with the scope {needed}")


ANYBODY: Final = Caller("anybody")


class KeySpec(NamedTuple):
    """Request for an API key. `expires_at` None: never. Rates are per second; 0: unlimited, None: the configured ones."""

    name: str
    scopes: Sequence[str]
    expires_at: Millis | None = None
    requests_per_second: int | None = None
    bytes_per_second: int | None = None

    def checked(self, now: Millis) -> KeySpec:
        """Return the spec with sorted, unique scopes. Raises `invalid_request`, naming the field."""
        if not QUEUE_NAME.fullmatch(self.name):
            raise invalid("name", "expected a name for the key: 1 to 128 of A-Z a-z 0-9 _ . -, not beginning with . or -")
        if not self.scopes:
            raise invalid("scopes", f"expected at least one scope; {_EXPECTED}")
        if len(self.scopes) > MAX_KEY_SCOPES:
            raise invalid("scopes", f"more than {MAX_KEY_SCOPES} scopes; use patterns of queue names")
        scopes = sorted({str(parse_scope(text, f"scopes[{place}]")) for place, text in enumerate(self.scopes)})
        if self.expires_at is not None and self.expires_at <= now:
            raise invalid("expires_at", "must be in the future")
        if self.expires_at is not None and self.expires_at > now + MAX_KEY_TIMEOUT:
            raise invalid("expires_at", f"more than {MAX_KEY_TIMEOUT // 86_400_000:,} days ahead; leave it out if the key is not to expire")
        for field in ("requests_per_second", "bytes_per_second"):
            if not 0 <= (getattr(self, field) or 0) <= MAX_KEY_RATE:
                raise invalid(field, f"must be between 0 (no limit) and {MAX_KEY_RATE}")
        return self._replace(scopes=scopes)


def check_admin_key(text: str, field: str) -> str:
    """Check the configured admin key, which needs no meta store. Raises `invalid_request`, without quoting it, if it could be guessed."""
    if len(text) < MIN_ADMIN_KEY or not text.isascii() or not text.isprintable() or " " in text:
        expected = f"expected at least {MIN_ADMIN_KEY} random ASCII characters without spaces, such as `openssl rand -hex 32` makes"
        raise invalid(field, expected)
    return text


class ApiKey(msgspec.Struct, frozen=True):
    """Record of an API key in the meta store: never the secret, only its SHA-256."""

    key_id: str
    name: str
    scopes: tuple[str, ...]
    digest: bytes
    created_at: Millis
    expires_at: Millis | None = None
    requests_per_second: int | None = None
    bytes_per_second: int | None = None

    def caller(self) -> Caller:
        """Return the key's holder. Unknown scopes, written by a newer version, give no right."""
        return Caller(f"{self.name}/{self.key_id}", tuple(_known(self.scopes)), self.key_id)


def _known(scopes: Sequence[str]) -> list[Scope]:
    found = []
    for text in scopes:
        try:
            found.append(parse_scope(text, "scopes"))
        except SluicewayError:
            continue
    return found


def encode_key(key: ApiKey) -> bytes:
    return msgspec.json.encode(key)


def decode_key(data: bytes) -> ApiKey:
    return msgspec.json.decode(data, type=ApiKey)
