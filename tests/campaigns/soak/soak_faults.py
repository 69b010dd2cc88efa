"""What is done to the server of a soak while it works: seeded, one after the other."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.campaigns.blackbox.nemeses import Nemesis, Strike
from tests.campaigns.blackbox.targets import Member
from tests.campaigns.kit.lines import HOST
from tests.campaigns.soak.soak_operators import request

CROWD: Final = 40
"""Clients that leave together."""
_WAITING: Final = '{"queue_name": "ticks", "client_id": "crowd", "request_timeout": "60s"}'
_RESET: Final = struct.pack("ii", 1, 0)

_BASE: Final = '[server]\naudit_entries = 500\n\n[backends.default]\nkind = "sqlite"\n'
"""With few audit entries, so that their number stands still early."""
_SPARE: Final = '\n[backends.spare]\nkind = "sqlite"\npartition_affinity = 0.0\n'
"""No partition is placed there, so it may be removed again."""
_VARIANTS: Final = (
    "",
    _SPARE,
    '\n[log]\nformat = "json"\n',
    "\n[limits]\nrequests_per_second = 1000000\n",
    f'\n[log]\nformat = "json"\n{_SPARE}',
)
_BROKEN: Final = '\n[log]\nlevel = "loud"\n'


class Settings:
    """The server's configuration file. A restart takes the last one that is valid."""

    def __init__(self) -> None:
        self._number = 0

    @property
    def text(self) -> str:
        return _BASE + _VARIANTS[self._number % len(_VARIANTS)]

    def change(self) -> None:
        self._number += 1

    @property
    def broken(self) -> str:
        return _BASE + _BROKEN


def faults(member: Member, settings: Settings) -> list[Nemesis]:
    """Those that leave the process as it is."""
    return [
        Nemesis("freeze", lambda _: _freeze(member), (0.5, 3.0), hangs=True),
        Nemesis("reload", lambda _: _reload(member, settings), (1.0, 2.0)),
        Nemesis("broken reload", lambda _: _reload(member, settings, is_broken=True), (1.0, 2.0)),
        Nemesis("crowd leaves", lambda _: _crowd(member), (1.0, 3.0)),
    ]


def ends(member: Member, begun: Callable[[], None]) -> list[Nemesis]:
    """Those after which there is another process. `begun` is told when it takes calls."""
    return [
        Nemesis("kill", lambda _: _end(member, member.kill, begun), (0.2, 1.0), hangs=True),
        Nemesis("restart", lambda _: _end(member, lambda: _stop(member), begun), (0.2, 1.0), hangs=True),
    ]


def _freeze(member: Member) -> Strike:
    member.freeze()
    return Strike("", member.thaw)


def _end(member: Member, end: Callable[[], None], begun: Callable[[], None]) -> Strike:
    end()

    def revive() -> None:
        member.revive()
        begun()

    return Strike("", revive)


def _stop(member: Member) -> None:
    code = member.stop()
    assert code == 0, f"the server was stopped, and ended with {code}:\n{member.tail()}"


def _reload(member: Member, settings: Settings, *, is_broken: bool = False) -> Strike:
    """A new configuration file, and the signal to read it. A broken one must be refused, and the server goes on."""
    if not is_broken:
        settings.change()
    member.config_file.write_text(settings.broken if is_broken else settings.text)
    os.kill(member.pid, signal.SIGHUP)
    return Strike("", lambda: _put_back(member.config_file, settings))


def _put_back(file: Path, settings: Settings) -> None:
    file.write_text(settings.text)


def _crowd(member: Member) -> Strike:
    """Clients that wait for an item, and all leave at the same moment."""
    waiting: list[socket.socket] = []
    with suppress(OSError):
        for _ in range(CROWD):
            waiting.append(socket.create_connection((HOST, member.links.clients.port), timeout=5))
            waiting[-1].sendall(request(_WAITING))
    return Strike("", lambda: _leave(waiting))


def _leave(waiting: Sequence[socket.socket]) -> None:
    chance = random.Random(len(waiting))
    for each in waiting:
        if chance.random() < 0.5:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        each.close()
