"""`sluiceway produce`: batches lines into calls of up to 1,000 items."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Protocol, cast

import click

from sluiceway.cli.session import Session
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_JSON

READ_BYTES = 1 << 20
CALL_BYTES = 8 << 20
"""Maximum payload bytes per call: base64 adds a third, and the body must stay below the server's limit."""


class _Readable(Protocol):
    def read1(self, size: int, /) -> bytes:
        """The available bytes, up to `size`; blocks only if there are none."""
        ...


def produce_lines(session: Session, queue: str, items: tuple[str, ...], file: str | None, key: str | None) -> None:
    """Produce the items, or the lines of the file or of stdin, and print the result."""
    if items and file:
        raise click.UsageError("pass items or --file, not both")
    if file:
        with open(file, "rb") as stream:
            _produce(session, queue, _calls(_lines(stream)), key)
    elif items and items != ("-",):
        _produce(session, queue, _calls(os.fsencode(item) for item in items), key)
    else:
        if not items and sys.stdin.isatty():
            raise click.UsageError("pass items, --file FILE, or - for lines on stdin")
        # With a key, every run must cut the calls at the same lines, however slowly they arrive.
        _produce(session, queue, _calls(_lines(cast(_Readable, sys.stdin.buffer)), prompt=key is None), key)


def _produce(session: Session, queue: str, lots: Iterable[list[bytes]], key: str | None) -> None:
    stored = repeated = calls = 0
    try:
        for lot in lots:
            answer = session.client.produce(queue, lot, idempotency_key=f"{key}/{calls}" if key else None)
            stored, calls = stored + answer.count, calls + 1
            repeated += answer.count if answer.deduplicated else 0
            if session.as_json:
                session.print(answer, "")
            elif session.progress and calls > 1:
                click.echo(f"\r{stored:,} items", err=True, nl=False)
    except SluicewayError as error:
        repeat = "repeat the same command: nothing is stored twice" if key else "with --key the whole command could be repeated safely"
        session.fail(error, stored, f"items were stored before this error; {repeat}")
    if session.progress and calls > 1:
        click.echo("\r\x1b[K", err=True, nl=False)
    if session.as_json:
        return
    before = f" ({repeated:,} stored earlier)" if repeated else ""
    if calls == 0:
        click.echo("Nothing to store", err=True)
    elif calls == 1:
        ids = answer.first_id if stored == 1 else f"{answer.first_id} to {answer.ids[-1]}"
        click.echo(f"Stored {stored:,} in partition {answer.partition}: {ids}{before}")
    else:
        click.echo(f"Stored {stored:,} in {calls:,} calls{before}")


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
