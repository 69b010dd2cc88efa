"""`sluiceway produce`: lines in, calls of up to 1,000 items out."""

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
"""Payload in one call: base64 makes a third more of it, and the body must stay below the server's limit."""


class _Readable(Protocol):
    def read1(self, size: int, /) -> bytes:
        """What is there, up to `size` bytes; waits only if nothing is."""
        ...


def produce_lines(session: Session, queue: str, items: tuple[str, ...], file: str | None, key: str | None) -> None:
    """Produce the items, the file's lines, or stdin's, and print what was stored."""
    if items and file:
        raise click.UsageError("give items or --file, not both")
    if file:
        with open(file, "rb") as stream:
            _produce(session, queue, _calls(_lines(stream)), key)
    elif items and items != ("-",):
        _produce(session, queue, _calls(os.fsencode(item) for item in items), key)
    else:
        if not items and sys.stdin.isatty():
            raise click.UsageError("give items, --file FILE, or - for lines on stdin")
        # With a key the calls must be cut alike every time, however the lines trickle in.
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
        repeat = "repeat the same command, and nothing is stored twice" if key else "with --key such a command can be repeated as a whole"
        session.fail(error, stored, f"items were stored before this; {repeat}")
    if session.progress and calls > 1:
        click.echo("\r\x1b[K", err=True, nl=False)
    if session.as_json:
        return
    before = f" ({repeated:,} were there already)" if repeated else ""
    if calls == 0:
        click.echo("there was nothing to store", err=True)
    elif calls == 1:
        ids = answer.first_id if stored == 1 else f"{answer.first_id} to {answer.ids[-1]}"
        click.echo(f"stored {stored:,} in partition {answer.partition}: {ids}{before}")
    else:
        click.echo(f"stored {stored:,} in {calls:,} calls{before}")


def _lines(stream: _Readable) -> Iterator[bytes | None]:
    """The stream's lines without their ends; None wherever a reader may have to wait for more."""
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
    """Lines, as many as one call may carry. `prompt`: what has arrived is not kept waiting for more."""
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
