"""Redis with a list for each key, a sorted set of keys that are ready, and a lock for each key: what is built where order by key is needed.

Three Lua scripts, each atomic, called by EVALSHA once a batch:

* produce: for each key RPUSH of its items to `items:KEY`, and ZADD NX to `ready`, unless it is in `locks`.
* lease: ZPOPMIN from `ready`, LRANGE of that key's first items, ZADD to `locks` until a minute later, HSET of its owner; then the next
  key, until the batch is full. Before that, ZRANGEBYSCORE of `locks` for those that ran out, which are ready again.
* settle: for each key that this client still owns (HGET), LTRIM of the items that were settled, ZREM and HDEL of its lock, and ZADD to
  `ready` if it has more (EXISTS).

Items stay in their list until they are settled, so those of a client that dies come again, in order. A client that gets none asks again
after POLL. The client is prepared bytes on our own protocol implementation, as in `redis-…-raw`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.by_key.keyed_load import PATIENCE, KeyedClient, KeyedWork, split
from bench.pipeline import Pipeline
from bench.systems.redis import found, version

__all__ = ["ORDER", "clients", "found", "version"]

ORDER = (
    "Of a key, one client at a time has items, in order; they stay in its list until it settles them. "
    "Written by hand: nothing counts attempts, keeps dead items, or delays a retry."
)
POLL = 0.005
"""Seconds."""
LEASE = 60
"""Seconds until a lock runs out."""

PRODUCE = b"""
local now = redis.call('TIME')[1]
local at = 1
while at <= #ARGV do
  local key, count = ARGV[at], tonumber(ARGV[at + 1])
  redis.call('RPUSH', 'items:' .. key, unpack(ARGV, at + 2, at + 1 + count))
  if not redis.call('ZSCORE', 'locks', key) then redis.call('ZADD', 'ready', 'NX', now, key) end
  at = at + 2 + count
end"""
LEASE_SCRIPT = b"""
local now, owner, left, seconds = tonumber(redis.call('TIME')[1]), ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
for _, key in ipairs(redis.call('ZRANGEBYSCORE', 'locks', '-inf', now, 'LIMIT', 0, 100)) do
  redis.call('ZREM', 'locks', key)
  redis.call('HDEL', 'owners', key)
  redis.call('ZADD', 'ready', 'NX', 0, key)
end
local taken = {}
while left > 0 do
  local key = redis.call('ZPOPMIN', 'ready')[1]
  if not key then break end
  local items = redis.call('LRANGE', 'items:' .. key, 0, left - 1)
  redis.call('ZADD', 'locks', now + seconds, key)
  redis.call('HSET', 'owners', key, owner)
  taken[#taken + 1] = key
  taken[#taken + 1] = items
  left = left - #items
end
return taken"""
SETTLE = b"""
local now, owner, settled = redis.call('TIME')[1], ARGV[1], 0
for at = 2, #ARGV, 2 do
  local key, count = ARGV[at], tonumber(ARGV[at + 1])
  if redis.call('HGET', 'owners', key) == owner then
    redis.call('LTRIM', 'items:' .. key, count, -1)
    redis.call('ZREM', 'locks', key)
    redis.call('HDEL', 'owners', key)
    if redis.call('EXISTS', 'items:' .. key) == 1 then redis.call('ZADD', 'ready', now, key) end
    settled = settled + count
  end
end
return settled"""


@asynccontextmanager
async def clients(name: str, address: str, work: KeyedWork) -> AsyncIterator[list[KeyedClient]]:
    loop = asyncio.get_running_loop()
    connections = [(await loop.create_connection(Commands, "127.0.0.1", int(address)))[1] for _ in range(2 * work.clients)]
    await connections[0].do(b"FLUSHALL")
    scripts = [(await connections[0].do(b"SCRIPT", b"LOAD", script)) for script in (PRODUCE, LEASE_SCRIPT, SETTLE)]
    yield [KeyLists(work, number, scripts, *connections[2 * number : 2 * number + 2]) for number in range(work.clients)]
    await connections[0].do(b"FLUSHALL")
    for each in connections:
        each.close()


class Commands(Pipeline[Any]):
    """A connection for RESP."""

    def __init__(self) -> None:
        import hiredis

        super().__init__()
        self.pack = hiredis.pack_command
        self._reader = hiredis.Reader()

    def read(self, data: bytes) -> list[Any]:
        self._reader.feed(data)
        answers = []
        while (answer := self._reader.gets()) is not False:
            answers.append(answer)
        return answers

    async def do(self, *command: bytes | int) -> Any:
        """Raises the server's error."""
        (answer,) = await self.call(self.pack(command))
        return _checked(answer)


class KeyLists(KeyedClient):
    def __init__(self, work: KeyedWork, number: int, scripts: list[bytes], producing: Commands, leasing: Commands) -> None:
        self._producing, self._leasing = producing, leasing
        self._produce_script, self._lease_script, self._settle_script = scripts
        self._owner = secrets.token_bytes(8)
        self._keys = [key.encode() for key in work.keys_of(number)[: work.keys]]
        self._each = b"%d" % (work.batch // work.keys)
        self._lease = leasing.pack((b"EVALSHA", self._lease_script, 0, self._owner, work.batch, LEASE))

    async def produce(self, payloads: bytes) -> None:
        items, arguments = split(payloads), []
        for number, key in enumerate(self._keys):
            # Row by row, the keys take turns.
            arguments += [key, self._each, *items[number :: len(self._keys)]]
        await self._producing.do(b"EVALSHA", self._produce_script, 0, *arguments)

    async def lease(self) -> tuple[bytes, Any]:
        until = time.perf_counter() + PATIENCE
        while not (taken := _checked((await self._leasing.call(self._lease))[0])):
            if time.perf_counter() > until:
                return b"", None
            await asyncio.sleep(POLL)
        return _read(taken)

    async def complete_and_lease(self, leased: Any) -> tuple[bytes, Any]:
        settled, taken = map(_checked, await self._leasing.call(self._settle(leased) + self._lease, 2))
        _check_settled(settled, leased)
        return _read(taken) if taken else await self.lease()

    async def complete(self, leased: Any) -> None:
        (settled,) = map(_checked, await self._leasing.call(self._settle(leased)))
        _check_settled(settled, leased)

    def _settle(self, leased: list[bytes | int]) -> bytes:
        command: bytes = self._leasing.pack((b"EVALSHA", self._settle_script, 0, self._owner, *leased))
        return command


def _read(taken: list[Any]) -> tuple[bytes, list[bytes | int]]:
    """Payloads, and each key with the number of its items."""
    payloads, leased = [], []
    for key, items in zip(taken[::2], taken[1::2], strict=True):
        payloads += items
        leased += [key, len(items)]
    return b"".join(payloads), leased


def _check_settled(settled: int, leased: list[Any]) -> None:
    if settled != sum(leased[1::2]):
        raise RuntimeError(f"{settled} of {sum(leased[1::2])} items settled")


def _checked(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
