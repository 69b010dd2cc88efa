"""One of several processes that serve one address together. A supervisor starts it (`python -m sluiceway.server.worker`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import threading

import msgspec

from sluiceway.adapters import system
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server.run import serve_worker
from sluiceway.server.workers import BEAT, KILL_AFTER, Said, WorkerOrder


def end_with_parent(shutdown_timeout: Millis) -> None:
    """Stop gracefully when standard input ends, because the supervisor has died, however it did; then kill the process if need be."""

    def watch() -> None:
        # Not through `sys.stdin`: a thread that holds its lock keeps the interpreter from ending.
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait((shutdown_timeout + KILL_AFTER) / 1_000)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def say(said: Said) -> None:
    """Send the supervisor a message."""
    os.write(1, msgspec.json.encode(said) + b"\n")


def beat() -> None:
    """Send the supervisor a heartbeat of the event loop, now and every BEAT ms."""
    # The supervisor may be frozen or gone; do not wait for it.
    with contextlib.suppress(OSError):
        os.write(1, b"\n")
    asyncio.get_running_loop().call_later(BEAT / 1_000, beat)


def serves(url: str) -> None:
    """Report the URL to the supervisor, and begin the heartbeats."""
    say(Said(url=url))
    os.set_blocking(1, False)
    beat()


def main() -> None:
    """Read the order and the server's time from standard input, and serve."""
    # They come from the supervisor, which has started this process; no other process can write there.
    order: WorkerOrder = pickle.load(sys.stdin.buffer)
    system.follow(pickle.load(sys.stdin.buffer))
    end_with_parent(order.loaded.configuration.server.shutdown_timeout)
    try:
        serve_worker(order, serves)
    except SluicewayError as error:
        say(Said(code=error.code, detail=error.detail, field=error.field))
        sys.exit(1)
    except OSError as error:
        say(Said(detail=str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
