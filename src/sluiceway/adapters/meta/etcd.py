"""etcd MetaStore, shared by processes on any number of machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from sluiceway.adapters import system
from sluiceway.adapters.meta.commit import HISTORY, check_commit, known_at
from sluiceway.adapters.meta.etcd_gateway import OUT_OF_RANGE, EtcdError, EtcdGateway, parse_address
from sluiceway.adapters.meta.watches import changed_by, concerns, hint_of
from sluiceway.kernel.clock import Millis
from sluiceway.ports.meta_store import ConflictError, Entry, MetaUnknownError, Stamp, View
from sluiceway.ports.partition_store import StoreUnavailableError

EARLIER = b"1"
LAYOUT = b"2"
"""Value of the key `layout`. An instance that finds another value is too old for the store. It upgrades EARLIER: the keys are the same, but
queue records have more fields, which an older version would lose."""
MAX_OPS = 50
"""Operations side by side in a transaction, and keys that it compares. etcd's default of 128 then leaves MAX_GROUPED to each nested
transaction."""
MAX_GROUPED = 70
MAX_COMPARED_BYTES = 32 << 10
"""Total of keys that a transaction compares: etcd's default of 1.5 MiB leaves this beside the largest commit."""
TRACE_BYTES = 128
"""Length of a deleted key in its trace, so that 1,000 long ones fit beside the deletes. Keys with a common prefix may share a trace."""
MAX_FORGOTTEN = 50
"""Traces removed per transaction."""
MAX_AT_ONCE = 8
"""Keys and prefixes of a view requested concurrently."""
SMALL = 16 << 10
"""Bytes of values up to which a view is read whole: the changes since take a call more."""

Message = dict[str, object]


class _Value(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    mod_revision: Stamp = 0
    version: int = 0
    """Number of puts since the key was created."""


class _Header(msgspec.Struct):
    revision: Stamp = 0


class _Range(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    kvs: list[_Value] = []


class _Put(msgspec.Struct):
    prev_kv: _Value = msgspec.field(default_factory=_Value)


class _Answer(msgspec.Struct):
    response_put: _Put = msgspec.field(default_factory=_Put)
    response_range: _Range = msgspec.field(default_factory=_Range)


class _Done(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    succeeded: bool = False
    responses: list[_Answer] = []


class _Event(msgspec.Struct):
    kv: _Value


class _Watched(msgspec.Struct):
    events: list[_Event] = []
    canceled: bool = False


class _Streamed(msgspec.Struct):
    result: _Watched = msgspec.field(default_factory=lambda: _Watched(canceled=True))
    """Missing in a message that carries an error."""


class EtcdMetaStore:
    """A durable MetaStore shared across machines: the keys of an etcd that begin with a name and a slash.

    The stamp is etcd's revision, which other clients' writes raise too. Every commit puts one key, the head, whose revision is therefore
    the newest stamp. etcd cannot compare revisions of deleted keys, so a delete leaves a trace; a trace lives for one to two times HISTORY
    commits, and a question about anything older is answered as *changed*. Deleting a missing key counts as a change.

    A view takes one call for the head and one for each key and prefix, all at etcd's revision of the first. What has changed since a view
    takes one for the head, one for the entries and one for the traces.

    A call is given `request_timeout` at each of the endpoints. Any fault during a commit is a MetaUnknownError, during a read a
    StoreUnavailableError. A commit with a hint also puts the key `hint`, whose value says what has changed: `watch` follows that key by
    etcd's own watch, so other commits are sent to no watcher. It renews the watch after `poll_interval` of silence. Raises
    `invalid_request` for a bad URL. Use from one event loop.
    """

    def __init__(self, url: str, *, request_timeout: Millis = 5_000, poll_interval: Millis = 2_000) -> None:
        address = parse_address(url)
        self._etcd = EtcdGateway(address, request_timeout)
        self._request_timeout = request_timeout
        self._poll_interval = poll_interval
        base = address.name.encode()
        self._head, self._layout, self._history = base + b"/head", base + b"/layout", base + b"/history"
        self._probe, self._hint = base + b"/probe", base + b"/hint"
        self._entries, self._traces = base + b"/entry/", base + b"/trace/"
        self._prepared = False
        self._seen: Stamp = 0
        self._forgetting: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        spans = [*(_only(self._entries + key.encode()) for key in keys), *map(self._under, prefixes)]
        stamp, found = await self._read(spans)
        cut = len(self._entries)
        return View(stamp, {entry.key[cut:].decode(): Entry(entry.value, entry.mod_revision) for entry in found})

    async def refresh(self, view: View, prefix: str) -> View:
        if sum(len(entry.value) for entry in view.entries.values()) < SMALL:
            return await self.read(prefixes=[prefix])
        since: Message = {"min_mod_revision": view.stamp + 1}
        traced = {**_span(self._traces + prefix.encode()[:TRACE_BYTES]), "keys_only": True}
        stamp, found = await self._read([self._under(prefix) | since, traced | since])
        put = {entry.key.removeprefix(self._entries): entry for entry in found if entry.key.startswith(self._entries)}
        # A deleted key that was put again is among the others.
        gone = {trace.key.removeprefix(self._traces) for trace in found if trace.key.startswith(self._traces)} - put.keys()
        if known_at(view, stamp) is not view or any(len(trace) == TRACE_BYTES for trace in gone):
            # Which key a trace of that length stands for is not known.
            return await self.read(prefixes=[prefix])
        rows = [(key.decode(), entry.value, entry.mod_revision) for key, entry in put.items()]
        return view.after(stamp, [*rows, *((key.decode(), None, stamp) for key in gone)])

    async def _newest(self) -> tuple[Stamp, Stamp]:
        """The newest stamp, and etcd's own revision at that moment."""
        answer = await self._range(_only(self._head))
        return (answer.kvs[0].mod_revision if answer.kvs else 0), answer.header.revision

    async def _read(self, spans: Sequence[Message]) -> tuple[Stamp, list[_Value]]:
        """What is in the spans, as of one moment, and the newest stamp then."""
        while True:
            stamp, revision = await self._newest()
            try:
                found = await self._read_at(spans, revision)
            except EtcdError as error:
                # Compacted meanwhile.
                if error.code != OUT_OF_RANGE:
                    raise
            else:
                self._seen = max(self._seen, stamp)
                return stamp, found

    async def _read_at(self, spans: Sequence[Message], revision: Stamp) -> list[_Value]:
        # Separate calls: etcd 3.5.0 to 3.5.6 may crash when the client of a read-only transaction disconnects.
        found: list[_Value] = []
        for start in range(0, len(spans), MAX_AT_ONCE):
            answers = await asyncio.gather(*(self._range({**span, "revision": revision}) for span in spans[start : start + MAX_AT_ONCE]))
            found += [entry for answer in answers for entry in answer.kvs]
        return found

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        checks, unchanged, puts = checks or {}, unchanged or {}, puts or {}
        check_commit(puts, deletes)
        compares = [self._has_stamp(key, stamp) for key, stamp in checks.items()] + self._unchanged(unchanged)
        size = sum(len(key.encode()) for key in [*checks, *unchanged])
        writes = self._writes(puts, deletes, hint=hint)
        try:
            if len(compares) <= MAX_OPS and size <= MAX_COMPARED_BYTES:
                stamp = await self._write(compares, writes)
            else:
                async with asyncio.timeout(self._request_timeout / 1000):
                    stamp = await self._write_after(compares, writes)
        except (StoreUnavailableError, TimeoutError) as error:
            raise MetaUnknownError(f"meta store: {str(error) or 'too many concurrent commits'}") from error
        if stamp is None:
            raise ConflictError("a key, or something under a prefix, has changed")
        self._seen = max(self._seen, stamp)
        return stamp

    async def _write_after(self, compares: Sequence[Message], writes: Sequence[Message]) -> Stamp | None:
        """Commit with more compares than fit into one transaction; its own compare is that no commit has happened since they held."""
        while True:
            newest, _ = await self._newest()
            for start in range(0, len(compares), MAX_OPS):
                # Include a put, since a read-only transaction is dangerous.
                probe: list[Message] = [{"request_put": _only(self._probe)}]
                if not (await self._transact(compares[start : start + MAX_OPS], probe)).succeeded:
                    return None
            stamp = await self._write([_compare(self._head, newest)], writes)
            if stamp is not None:
                return stamp

    async def _write(self, compares: Sequence[Message], writes: Sequence[Message]) -> Stamp | None:
        """Commit. Returns the stamp, or None if a compare did not hold."""
        head: Message = {"request_put": {"key": self._head, "prev_kv": True}}
        done = await self._transact(compares, [head, *writes], repeatable=False)
        if not done.succeeded:
            return None
        stamp, number = done.header.revision, done.responses[0].response_put.prev_kv.version + 1
        if number % HISTORY == 0 and (self._forgetting is None or self._forgetting.done()):
            self._forgetting = asyncio.create_task(self._forget(stamp))
        return stamp

    def _writes(self, puts: Mapping[str, bytes], deletes: Sequence[str], *, hint: bool) -> list[Message]:
        gone = [key.encode() for key in deletes]
        traces = {key[:TRACE_BYTES] for key in gone}
        writes: list[Message] = [{"request_put": {"key": self._entries + key.encode(), "value": value}} for key, value in puts.items()]
        writes += [{"request_delete_range": _only(self._entries + key)} for key in gone]
        writes += [{"request_put": _only(self._traces + trace)} for trace in traces]
        if hint:
            writes.append({"request_put": {"key": self._hint, "value": hint_of([*puts, *deletes]).encode()}})
        if len(writes) < MAX_OPS:
            return writes
        return [{"request_txn": {"success": writes[start : start + MAX_GROUPED]}} for start in range(0, len(writes), MAX_GROUPED)]

    # ---- compares ---------------------------------------------------------------------------------------------

    def _under(self, prefix: str) -> Message:
        return _span(self._entries + prefix.encode())

    def _has_stamp(self, key: str, stamp: Stamp | None) -> Message:
        # A missing key has revision 0.
        return _compare(self._entries + key.encode(), stamp or 0)

    def _unchanged(self, unchanged: Mapping[str, Stamp]) -> list[Message]:
        if not unchanged:
            return []
        spans = [(self._under(prefix), since) for prefix, since in unchanged.items()]
        spans += [(_span(self._traces + prefix.encode()[:TRACE_BYTES]), since) for prefix, since in unchanged.items()]
        remembered = _number(min(unchanged.values()) + 1)
        return [
            {"key": self._history, "target": "VALUE", "result": "LESS", "value": remembered},
            *({**span, "target": "MOD", "result": "LESS", "mod_revision": since + 1} for span, since in spans),
        ]

    # ---- calls to etcd ----------------------------------------------------------------------------------------

    async def _range(self, span: Message) -> _Range:
        await self._prepare()
        return await self._etcd.ask("/v3/kv/range", span, _Range)

    async def _transact(self, compare: Sequence[Message], success: Sequence[Message], *, repeatable: bool = True) -> _Done:
        await self._prepare()
        return await self._etcd.ask("/v3/kv/txn", {"compare": compare, "success": success}, _Done, repeatable=repeatable)

    async def _prepare(self) -> None:
        """Check and upgrade the layout, before the first call."""
        if self._prepared:
            return
        begin: list[Message] = [
            {"request_put": {"key": self._layout, "value": LAYOUT}},
            {"request_put": {"key": self._history, "value": _number(0) + b" " + _number(0)}},
        ]
        message = {"compare": [_compare(self._layout, 0)], "success": begin, "failure": [{"request_range": _only(self._layout)}]}
        done = await self._etcd.ask("/v3/kv/txn", message, _Done)
        if not done.succeeded:
            await self._upgrade(done.responses[0].response_range.kvs[0])
        self._prepared = True

    async def _upgrade(self, found: _Value) -> None:
        """Upgrade the layout unless it is current."""
        if found.value not in (EARLIER, LAYOUT):
            raise StoreUnavailableError(
                "a newer version of Sluiceway wrote this meta store; run that version, or change the name in the URL"
            )
        if found.value == EARLIER:
            success = [{"request_put": {"key": self._layout, "value": LAYOUT}}]
            # If another instance comes first, it has done the same.
            await self._etcd.ask(
                "/v3/kv/txn", {"compare": [_compare(self._layout, found.mod_revision)], "success": success, "failure": []}, _Done
            )

    # ---- history trimming -------------------------------------------------------------------------------------

    async def _forget(self, stamp: Stamp) -> None:
        """Remove traces older than HISTORY commits. The key `history` holds the stamp forgotten so far, and that of the current run."""
        # The next run removes what this one leaves.
        with contextlib.suppress(StoreUnavailableError):
            found = (await self._range(_only(self._history))).kvs[0]
            remembered = int(found.value.split()[1])
            if remembered >= stamp:
                return
            # First, since from then on these traces are not consulted.
            history: list[Message] = [{"request_put": {"key": self._history, "value": _number(remembered) + b" " + _number(stamp)}}]
            if not (await self._transact([_compare(self._history, found.mod_revision)], history)).succeeded or not remembered:
                return
            span = {**_span(self._traces), "max_mod_revision": remembered, "keys_only": True, "limit": MAX_FORGOTTEN}
            while traces := (await self._range(span)).kvs:
                # A trace renewed by a new delete stays.
                same = [_compare(trace.key, trace.mod_revision) for trace in traces]
                await self._transact(same, [{"request_delete_range": _only(trace.key)} for trace in traces])

    # ---- watch ------------------------------------------------------------------------------------------------

    def watch(self, prefix: str) -> AsyncIterator[Stamp]:
        """Yields for every change after this call. The first hint may be about an earlier one."""
        return self._watch(prefix, self._seen)

    async def _watch(self, prefix: str, since: Stamp) -> AsyncIterator[Stamp]:
        while not self._closed.is_set():
            try:
                # Earlier revisions may have been compacted; so may the newest stamp, where only other clients have written since.
                stamp, revision = await self._newest()
                changed, since = stamp > since, revision
                if changed:
                    yield stamp
                while not self._closed.is_set():
                    async for stamp, told in self._hints(since + 1):
                        since = stamp
                        if concerns(prefix, told):
                            yield stamp
            except StoreUnavailableError:
                # `read` reports faults; a hint may come late.
                await system.wait(self._closed, self._poll_interval)

    async def _hints(self, start: Stamp) -> AsyncIterator[tuple[Stamp, list[str]]]:
        """The stamps of commits from `start` on that are told to watchers, each with what has changed, until a period of silence. Raises
        EtcdError, also if `start` is compacted."""
        message = {"create_request": {**_only(self._hint), "start_revision": start}}
        async for streamed in self._etcd.lines("/v3/watch", message, _Streamed, self._poll_interval):
            if streamed.result.canceled:
                raise EtcdError("etcd ended a watch")
            if events := streamed.result.events:
                changed = {each for event in events for each in changed_by(event.kv.value.decode())}
                yield events[-1].kv.mod_revision, sorted(changed)

    async def close(self) -> None:
        self._closed.set()
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.wait([self._forgetting])
        await self._etcd.close()


def _only(key: bytes) -> Message:
    return {"key": key}


def _span(prefix: bytes) -> Message:
    """The range from the first key under the prefix to just past the last: UTF-8 never contains the byte 0xff."""
    return {"key": prefix, "range_end": prefix + b"\xff"}


def _compare(key: bytes, revision: Stamp) -> Message:
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def _number(number: int) -> bytes:
    """The number as a text with the same order."""
    return b"%020d" % number
