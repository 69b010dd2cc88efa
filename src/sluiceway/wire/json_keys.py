"""API keys in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from sluiceway.contract.fields import Duration, Label, QueueName, TimeText
from sluiceway.kernel.clock import Millis, check_duration, format_time
from sluiceway.kernel.limits import MAX_ITEMS_JSON, MAX_KEY_RATE, MAX_KEY_SCOPES, MAX_KEY_TIMEOUT
from sluiceway.model.access import ACTIONS, ApiKey, Caller, KeySpec, Scope
from sluiceway.wire.decoding import JsonDecoder, given_text
from sluiceway.wire.shapes import Shape

Rate = Annotated[int, Meta(ge=0, le=MAX_KEY_RATE)]
KeyName = QueueName
"""It is written as a queue's name is."""
_SCOPE = r"^(admin|(produce|consume|read|manage):[A-Za-z0-9_.\-*]{1,128})$"
ScopeText = Annotated[str, Meta(extra_json_schema={"pattern": _SCOPE, "examples": ["produce:orders-*"]})]
_SCOPES = Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_KEY_SCOPES})


class CreateKeyCall(msgspec.Struct, forbid_unknown_fields=True):
    """`expires_after` null: the key never expires. A rate of 0: no limit; null: as the server's configuration says."""

    name: KeyName
    scopes: Annotated[list[ScopeText], _SCOPES]
    expires_after: Duration | None = None
    requests_per_second: Rate | None = None
    bytes_per_second: Rate | None = None

    def spec(self, now: Millis) -> KeySpec:
        life = None if self.expires_after is None else check_duration(self.expires_after, "expires_after", 1, MAX_KEY_TIMEOUT)
        expires_at = None if life is None else now + life
        return KeySpec(self.name, self.scopes, expires_at, self.requests_per_second, self.bytes_per_second)


class ListKeysCall(msgspec.Struct, forbid_unknown_fields=True):
    """API keys by id. `pivot`: the id of the key to begin after."""

    pivot: Label | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_JSON)] = 100

    def checked(self) -> ListKeysCall:
        given_text(self.pivot, "pivot")
        return self


class RevokeKeyCall(msgspec.Struct, forbid_unknown_fields=True):
    key_id: str


class KeyInfo(Shape):
    """An API key, without its secret."""

    key_id: str
    name: KeyName
    scopes: list[ScopeText]
    created_at: TimeText
    expires_at: TimeText | None
    requests_per_second: int | None
    bytes_per_second: int | None


class CreatedKey(KeyInfo):
    """A new API key. `key` is what a caller sends; it is not kept, and cannot be shown again."""

    key: str

    def __repr__(self) -> str:
        return f"CreatedKey(key_id={self.key_id!r}, key=…)"


class OwnKey(Shape):
    """Whom the server takes a caller for, and what they may do."""

    key_id: str | None
    name: KeyName
    scopes: list[ScopeText]
    created_at: TimeText | None
    expires_at: TimeText | None
    requests_per_second: int | None
    bytes_per_second: int | None


class KeyPage(Shape):
    """Some API keys, by id."""

    items: list[KeyInfo]
    next: str | None


decode_create_key = JsonDecoder(CreateKeyCall)
decode_list_keys = JsonDecoder(ListKeysCall)
decode_revoke_key = JsonDecoder(RevokeKeyCall)


def key_page(keys: Sequence[ApiKey], limit: int) -> bytes:
    """The first `limit` of the keys; whether there are more says whether there is a next page."""
    following = keys[limit - 1].key_id if len(keys) > limit else None
    return msgspec.json.encode(KeyPage([KeyInfo(*_fields(key)) for key in keys[:limit]], following))


def created_key(key: ApiKey, text: str) -> bytes:
    return msgspec.json.encode(CreatedKey(*_fields(key), text))


def own_key(caller: Caller, key: ApiKey | None) -> bytes:
    """`key` None: the caller has none that is recorded. Who may do everything has every scope there is."""
    if key is not None:
        return msgspec.json.encode(OwnKey(*_fields(key)))
    scopes = [Scope(action) for action in ACTIONS] if caller.scopes is None else caller.scopes
    return msgspec.json.encode(OwnKey(None, caller.name, [str(scope) for scope in scopes], None, None, 0, 0))


def _fields(key: ApiKey) -> tuple[str, str, list[str], str, str | None, int | None, int | None]:
    expires_at = None if key.expires_at is None else format_time(key.expires_at)
    return key.key_id, key.name, list(key.scopes), format_time(key.created_at), expires_at, key.requests_per_second, key.bytes_per_second
