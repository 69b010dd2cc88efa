"""A supervisor and its workers, as real processes, without a server in them: what workers do is what the test says.

`python worker_stand_in.py FOLDER WORKERS [BEHAVIOUR]` is the parent. Each worker notes its process id in the folder, and each signal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import select
import signal
import socket
import sys
import time
from pathlib import Path

from sluiceway.adapters import system
from sluiceway.kernel.clock import Clock
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server import workers as module
from sluiceway.server.worker import end_with_parent, say
from sluiceway.server.workers import Said, Supervisor

SHUTDOWN_TIMEOUT = 60_000
HOUR = 3_600_000_000_000
"""In nanoseconds."""


def parent(folder: Path, count: int, behaviour: str) -> None:
    logging.basicConfig(stream=sys.stderr, level="INFO", format="%(message)s")
    sock = socket.create_server(("127.0.0.1", 0))
    order = pickle.dumps((str(folder), behaviour))
    if behaviour == "watched":
        module.MAX_MISSED = 3
    if behaviour == "stuck":
        module.KILL_AFTER = 0
    if behaviour == "tells the time":
        # An hour before the machine's clock jumped, which is an hour ahead now.
        system.follow(Clock(time.time_ns() - HOUR, time.clock_gettime_ns(system._STEADY or time.CLOCK_MONOTONIC)))
    supervisor = Supervisor(count, order, [sock], 0 if behaviour == "stuck" else SHUTDOWN_TIMEOUT, [sys.executable, __file__])
    try:
        asyncio.run(supervisor.run(lambda: print("ready", flush=True)))
    except (SluicewayError, OSError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    print("ended", flush=True)


def worker() -> None:
    folder, behaviour = pickle.load(sys.stdin.buffer)
    system.follow(pickle.load(sys.stdin.buffer))
    me = Path(folder) / str(os.getpid())
    came, told = os.pipe()
    os.set_blocking(told, False)
    # Noted by the handler in C: none is overlooked, whenever it comes.
    signal.set_wakeup_fd(told)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    end_with_parent(SHUTDOWN_TIMEOUT)
    me.write_text(str(system.clock_ahead()) if behaviour == "tells the time" else "")
    if behaviour == "refuses":
        say(Said(code="unavailable", detail="the disk is on fire", field="data"))
        sys.exit(1)
    if behaviour == "taken":
        say(Said(detail="the port is taken"))
        sys.exit(1)
    if behaviour == "crashes":
        sys.exit(7)
    say(Said(url=f"http://worker-{os.getpid()}"))
    while True:
        if not select.select([came], [], [], module.BEAT / 1_000)[0]:
            os.write(1, b"\n")
        elif os.read(came, 1)[0] == signal.SIGHUP:
            if behaviour != "tells the time":
                me.write_text("reload")
        elif behaviour != "stuck":
            sys.exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        parent(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
    else:
        worker()
