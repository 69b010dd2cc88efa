"""API keys, as the server answers them."""

from __future__ import annotations

from typing import Annotated

from sluiceway.contract.fields import Answer, QueueName, Time, about, schema

KeyName = QueueName
"""It is written as a queue's name is."""
ScopeText = Annotated[
    str, schema(pattern=r"^(admin|(produce|consume|read|manage):[A-Za-z0-9_.\-*]{1,128})$", examples=["produce:orders-*"])
]

_NAME = about("Name of the key.")
_SCOPES = about("What the key may do: `admin`, or ACTION:PATTERN such as `produce:orders-*`.")
_EXPIRES = about("When the key expires; null: never.")
_REQUESTS = about("Limit of requests per second; 0: no limit, null: the server's default.")
_BYTES = about("Limit of bytes of request bodies per second; 0: no limit, null: the server's default.")


class KeyInfo(Answer, frozen=True, kw_only=True):
    """An API key, without its secret."""

    key_id: Annotated[str, about("Id of the key, for other calls. It is not secret.")]
    name: Annotated[KeyName, _NAME]
    scopes: Annotated[list[ScopeText], _SCOPES]
    created_at: Annotated[Time, about("When the key was created.")]
    expires_at: Annotated[Time | None, _EXPIRES] = None
    requests_per_second: Annotated[int | None, _REQUESTS] = None
    bytes_per_second: Annotated[int | None, _BYTES] = None


class CreatedKey(KeyInfo, frozen=True, kw_only=True):
    """A new API key."""

    key: Annotated[str, about("The key itself, which callers send. The server does not keep it and cannot show it again.")]

    def __repr__(self) -> str:
        return f"CreatedKey(key_id={self.key_id!r}, name={self.name!r}, scopes={self.scopes!r}, key=…)"


class OwnKey(Answer, frozen=True, kw_only=True):
    """The caller's own key, and what it may do. A caller without a key has a name and scopes, too."""

    key_id: Annotated[str | None, about("Id of the key, for other calls; null: the configuration's admin key, or no key is required.")]
    name: Annotated[KeyName, _NAME]
    scopes: Annotated[list[ScopeText], _SCOPES]
    created_at: Annotated[Time | None, about("When the key was created; null if `key_id` is.")] = None
    expires_at: Annotated[Time | None, _EXPIRES] = None
    requests_per_second: Annotated[int | None, _REQUESTS] = None
    bytes_per_second: Annotated[int | None, _BYTES] = None


class KeyPage(Answer, frozen=True, kw_only=True):
    """Some API keys, by id."""

    items: Annotated[list[KeyInfo], about("The keys of this page.")]
    next: Annotated[str | None, about("The pivot of the next page; null on the last.")] = None
