"""Members of a group, each in a process of its own: `python -m tests.campaigns.members.forked_members URL GROUP`.

Each line of its input has a number of processes to start.

The modules are loaded once, and each process is forked from there: a hundred starts would keep the machine busy for a minute. Its id is
printed. All of them end when the input does.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys

from sluiceway.group import GroupMember, open_meta_store

PR_SET_PDEATHSIG = 1


async def live(url: str, group: str) -> None:
    member = GroupMember(open_meta_store(url), group, lambda _: None, name="m", address=f"pid:{os.getpid()}")
    await member.join()
    await asyncio.Event().wait()


def main(url: str, group: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        for _ in range(int(line)):
            pid = os.fork()
            if not pid:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                asyncio.run(live(url, group))
            print(pid, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
