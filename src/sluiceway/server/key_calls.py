"""The calls on API keys."""

from __future__ import annotations

from collections.abc import Callable

from sluiceway.adapters.system import now
from sluiceway.contract.key_answers import CreatedKey, KeyPage, OwnKey
from sluiceway.instance.api_keys import ApiKeys
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.wire import json_keys
from sluiceway.wire.json_config import NoFields, decode_no_fields
from sluiceway.wire.shapes import Done


class KeyCalls:
    """Create, list, revoke and show keys. `keys` is called each time: the keys exist once the service is started."""

    def __init__(self, keys: Callable[[], ApiKeys]) -> None:
        self._keys = keys

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/keys.create",
                "admin",
                self._create,
                json_keys.CreateKeyCall,
                CreatedKey,
                "Create an API key; only this answer contains the key itself",
            ),
            Endpoint("/v1/keys.list", "admin", self._list, json_keys.ListKeysCall, KeyPage, "List the API keys, page by page"),
            Endpoint(
                "/v1/keys.revoke",
                "admin",
                self._revoke,
                json_keys.RevokeKeyCall,
                Done,
                "Revoke an API key; every server of the same meta store refuses it within a second",
                ("key_not_found",),
            ),
            Endpoint("/v1/keys.self", None, self._self, NoFields, OwnKey, "Show the caller's API key and its scopes"),
        ]

    async def _create(self, request: Request) -> Body:
        spec = json_keys.decode_create_key(request.body).spec(now())
        return json_keys.created_key(*await self._keys().create(spec, request.actor))

    async def _list(self, request: Request) -> Body:
        call = json_keys.decode_list_keys(request.body).checked()
        keys = [key for key in await self._keys().list() if key.key_id > (call.pivot or "")]
        return json_keys.key_page(keys, call.limit)

    async def _revoke(self, request: Request) -> Body:
        await self._keys().revoke(json_keys.decode_revoke_key(request.body).key_id, request.actor)
        return b"{}"

    async def _self(self, request: Request) -> Body:
        decode_no_fields(request.body)
        key_id = request.caller.key_id
        holder = self._keys().known(key_id) if key_id else None
        if key_id and holder is None:
            raise SluicewayError("unauthenticated", "the API key has expired or was revoked")
        return json_keys.own_key(request.caller, holder.key if holder else None)
