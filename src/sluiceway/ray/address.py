"""Where a queue is, for the driver and for Ray's workers, which open clients of their own."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from sluiceway.client import Client
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.secrets import read_secret

RETRY_FOR = "2m"
"""How long a call is repeated while the server is away: a restart delays a job in place of failing it."""


@dataclass(frozen=True)
class Address:
    """A queue, and how to reach it. `api_key` is a reference, since Ray stores the arguments of tasks.

    Raises `invalid_request` for an `api_key` that is the key itself.
    """

    url: str
    queue_name: str
    api_key: str
    ca_file: str

    def __post_init__(self) -> None:
        if self.api_key and not self.api_key.startswith(("env:", "file:")):
            raise invalid("api_key", "name the place of the key on the driver and on every worker: env:NAME or file:PATH")

    def client(self, client_id: str | None = None) -> Client:
        """A client for this process."""
        note = f" on {socket.gethostname()}; the driver and every worker need it"
        key = read_secret(self.api_key, "api_key", os.environ, note=note) if self.api_key else None
        return Client(self.url, client_id=client_id, retry_for=RETRY_FOR, api_key=key, ca_file=self.ca_file or None)
