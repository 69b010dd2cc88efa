"""`sluiceway produce`: batches lines into calls of up to 1,000 items."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import click

from sluiceway.cli.common import counted, printable
from sluiceway.cli.session import Session
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_JSON

if TYPE_CHECKING:
    from sluiceway.client import Item

READ_BYTES = 1 << 20
CALL_BYTES = 8 << 20
"""Maximum payload bytes per call: base64 adds a third, and the body must stay below the server's limit."""


class _Readable(Protocol):
    def read1(self, size: int, /) -> bytes:
        """The available bytes, up to `size`; blocks only if there are none."""
        ...


def produce_lines(
    session: Session,
    queue: str,
    items: tuple[str, ...],
    file: str | None,
    key: str | None,
    columns: Mapping[str, Any],
    fields: Mapping[str, str | None],
    blank_lines: bool,
    bundle: str | None,
) -> None:
    """Produce the items, or the lines of the file or of stdin, and print the result. `columns`: the other values that each item gets.

    `fields`: the members of each line's JSON object that have further ones. `bundle`: the bundle to which the items belong.
    """
    given = {name: value for name, value in columns.items() if value is not None}
    named = {name: member for name, member in fields.items() if member is not None}
    producer = _Producer(session, queue, key, given, named, bundle)
    if items and file:
        raise click.UsageError("pass items or --file, not both")
    if file:
        with open(file, "rb") as stream:
            producer.produce(_calls(producer.without_blanks(_lines(stream), blank_lines)))
    elif items and items != ("-",):
        producer.produce(_calls(os.fsencode(item) for item in items))
    else:
        if not items and sys.stdin.isatty():
            raise click.UsageError("pass items, --file FILE, or - for lines on stdin")
        # With a key, every run must cut the calls at the same lines, however slowly they arrive.
        lines = producer.without_blanks(_lines(cast(_Readable, sys.stdin.buffer)), blank_lines)
        producer.produce(_calls(lines, prompt=key is None))


class _Producer:
    """Sends batches, and tells what became of them."""

    def __init__(
        self, session: Session, queue: str, key: str | None, columns: Mapping[str, Any], fields: Mapping[str, str], bundle: str | None
    ) -> None:
        self._session, self._queue, self._key, self._columns, self._fields = session, queue, key, columns, fields
        self._bundle = bundle
        self._blank = 0

    def without_blanks(self, lines: Iterable[bytes | None], keep: bool) -> Iterator[bytes | None]:
        """The lines without blank ones, which are counted."""
        for line in lines:
            if line is not None and not keep and not line.strip():
                self._blank += 1
            else:
                yield line

    def produce(self, calls: Iterable[list[bytes]]) -> None:
        session, key = self._session, self._key
        stored = repeated = duplicates = sent = 0
        try:
            for payloads in calls:
                items = [self._item(payload) for payload in payloads]
                given = f"{key}/{sent}" if key else None
                answer = session.client.produce(self._queue, items, idempotency_key=given, bundle=self._bundle)
                stored, sent = stored + answer.stored, sent + 1
                duplicates += len(answer.duplicates)
                repeated += answer.stored if answer.deduplicated else 0
                if session.as_json:
                    session.print(answer, "")
                elif session.progress and sent > 1:
                    click.echo(f"\r{stored:,} items", err=True, nl=False)
        except SluicewayError as error:
            repeat = "repeat the same command: nothing is stored twice" if key else "with --key the whole command could be repeated safely"
            session.fail(error, stored, f"items were stored before this error; {repeat}")
        if session.progress and sent > 1:
            click.echo("\r\x1b[K", err=True, nl=False)
        if self._blank:
            click.echo(f"Skipped {counted(self._blank, 'blank line')} (--blank-lines stores them, too)", err=True)
        if session.as_json:
            return
        before = f" ({repeated:,} stored earlier)" if repeated else ""
        if sent == 0:
            click.echo("Nothing to store", err=True)
        elif sent > 1:
            click.echo(f"Stored {stored:,} in {sent:,} calls{before}")
        elif stored:
            there = {*answer.duplicates}
            ids = [each for at, each in enumerate(answer.ids) if at not in there]
            shown = ids[0] if stored == 1 else f"{ids[0]} to {ids[-1]}"
            click.echo(f"Stored {stored:,} in partition {ids[0].split('.')[1]}: {shown}{before}")
        if duplicates:
            which = f": {answer.ids[answer.duplicates[0]]}" if duplicates == sent == 1 else ""
            click.echo(f"{counted(duplicates, 'item')} not stored, as there is one with the same unique key{which}")

    def _item(self, payload: bytes) -> bytes | Item:
        if not self._columns and not self._fields:
            return payload
        from sluiceway.client import Item

        return replace(Item(payload, **self._columns), **_members(payload, self._fields))


_OPTIONS = {"key": "item-key-field", "unique_key": "unique-key-field"}


def _members(line: bytes, fields: Mapping[str, str]) -> dict[str, Any]:
    """The texts of those members of a line's JSON object; None: it has no such, or null. Raises `invalid_request`."""
    import msgspec

    found: dict[str, str | None] = {}
    for name, member in fields.items():
        try:
            text = msgspec.json.decode(line, type=dict[str, Any]).get(member)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise invalid(_OPTIONS[name], f"the line {printable(line, 80)} is not a JSON object") from None
        if text is not None and not isinstance(text, str):
            raise invalid(_OPTIONS[name], f"{member!r} is not a text in the line {printable(line, 80)}")
        found[name] = text
    return found


def _lines(stream: _Readable) -> Iterator[bytes | None]:
    """The stream's lines without line ends; None wherever the next read may block."""
    tail: list[bytes] = []
    while data := stream.read1(READ_BYTES):
        *ended, rest = data.split(b"\n")
        for line in ended:
            tail.append(line)
            yield b"".join(tail).removesuffix(b"\r")
            tail = []
        tail.append(rest)
        yield None
    if any(tail):
        yield b"".join(tail)


def _calls(lines: Iterable[bytes | None], prompt: bool = False) -> Iterator[list[bytes]]:
    """Batches of lines that fit into one call. With `prompt`, lines are sent before a read that may block."""
    call: list[bytes] = []
    size = 0
    for line in lines:
        full = line is not None and (len(call) == MAX_ITEMS_JSON or size + len(line) > CALL_BYTES)
        if call and (full or (line is None and prompt)):
            yield call
            call, size = [], 0
        if line is not None:
            call.append(line)
            size += len(line)
    if call:
        yield call
