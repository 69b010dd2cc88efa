"""JSON codec of the calls on API keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sluiceway.contract.fields import Duration, Label, time_field
from sluiceway.contract.key_answers import CreatedKey, KeyInfo, KeyName, KeyPage, OwnKey, ScopeText
from sluiceway.kernel.clock import Millis, check_duration
from sluiceway.kernel.limits import MAX_ITEMS_JSON, MAX_KEY_RATE, MAX_KEY_SCOPES, MAX_KEY_TIMEOUT
from sluiceway.model.access import ACTIONS, ApiKey, Caller, KeySpec, Scope
from sluiceway.wire.decoding import JsonDecoder, given_text

Rate = Annotated[int, Meta(ge=0, le=MAX_KEY_RATE)]
_SCOPES = Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_KEY_SCOPES})


class CreateKeyCall(msgspec.Struct, forbid_unknown_fields=True):
    """Create an API key. `expires_after` null: the key never expires. A rate of 0: no limit; null: the server's default."""

    name: KeyName
    scopes: Annotated[list[ScopeText], _SCOPES]
    expires_after: Duration | None = None
    requests_per_second: Rate | None = None
    bytes_per_second: Rate | None = None

    def spec(self, now: Millis) -> KeySpec:
        """The key to create. `now` is in milliseconds. Raises `invalid_request`."""
        life = None if self.expires_after is None else check_duration(self.expires_after, "expires_after", 1, MAX_KEY_TIMEOUT)
        expires_at = None if life is None else now + life
        return KeySpec(self.name, self.scopes, expires_at, self.requests_per_second, self.bytes_per_second)


class ListKeysCall(msgspec.Struct, forbid_unknown_fields=True):
    """List API keys in the order of their ids. `pivot`: the id of the previous page's last key."""

    pivot: Label | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_JSON)] = 100

    def checked(self) -> ListKeysCall:
        """The call itself, once its pivot is checked. Raises `invalid_request`."""
        given_text(self.pivot, "pivot")
        return self


class RevokeKeyCall(msgspec.Struct, forbid_unknown_fields=True):
    key_id: str


decode_create_key = JsonDecoder(CreateKeyCall)
decode_list_keys = JsonDecoder(ListKeysCall)
decode_revoke_key = JsonDecoder(RevokeKeyCall)


def key_page(keys: Sequence[ApiKey], limit: int) -> bytes:
    """The first `limit` of the keys as JSON. Pass one key more than `limit` to say that there is a next page."""
    following = keys[limit - 1].key_id if len(keys) > limit else None
    return msgspec.json.encode(KeyPage(items=[KeyInfo(**_fields(key)) for key in keys[:limit]], next=following))


def created_key(key: ApiKey, text: str) -> bytes:
    """A new key as JSON, with its secret `text`, which no later call returns."""
    return msgspec.json.encode(CreatedKey(**_fields(key), key=text))


def own_key(caller: Caller, key: ApiKey | None) -> bytes:
    """The caller's own key as JSON. `key` None: the caller has no stored key. A caller with unlimited access has every scope."""
    if key is not None:
        return msgspec.json.encode(OwnKey(**_fields(key)))
    scopes = [Scope(action) for action in ACTIONS] if caller.scopes is None else caller.scopes
    return msgspec.json.encode(
        OwnKey(key_id=None, name=caller.name, scopes=[str(scope) for scope in scopes], requests_per_second=0, bytes_per_second=0)
    )


def _fields(key: ApiKey) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "name": key.name,
        "scopes": list(key.scopes),
        "created_at": time_field(key.created_at),
        "expires_at": time_field(key.expires_at),
        "requests_per_second": key.requests_per_second,
        "bytes_per_second": key.bytes_per_second,
    }
