"""A real Azurite of the tests' own: the emulator of Azure Blob Storage, in memory.

`python -m tests.servers.azurite_server` installs its program with npm, unless there is one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from email.utils import formatdate

import httpx

from sluiceway.adapters.storage.bucket_objects import BucketObjects, in_azure
from tests.servers.program_server import TOOLS, ProgramServer

ACCOUNT, ACCESS_KEY = "tests", base64.b64encode(b"tests").decode()


class AzuriteServer(ProgramServer):
    """It has one container, `tests`, in the account `tests`."""

    program = "azurite-blob"
    folder = TOOLS / "azurite/node_modules/.bin"
    installer = ("npm", "install", "--prefix", str(TOOLS / "azurite"), "--no-audit", "--no-fund", "--ignore-scripts", "azurite@3.37.0")

    @property
    def url(self) -> str:
        """The account's, for the option `endpoint`."""
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def objects(self, prefix: str) -> BucketObjects:
        """A folder of the container."""
        return in_azure("tests", prefix, account=ACCOUNT, access_key=ACCESS_KEY, endpoint=self.url)

    def _arguments(self) -> Sequence[str]:
        return ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--inMemoryPersistence", "--disableTelemetry", "--silent"]

    def _environment(self) -> Mapping[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCESS_KEY}"}

    def _is_ready(self) -> bool:
        """Whether it has made the container, for which obstore has no call."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        # The verb, eleven standard headers that are not sent, those of Azure, and the resource: for an emulator, with the account twice.
        signed = [
            "PUT",
            *[""] * 11,
            *(f"{name}:{text}" for name, text in headers.items()),
            f"/{ACCOUNT}/{ACCOUNT}/tests",
            "restype:container",
        ]
        digest = hmac.digest(base64.b64decode(ACCESS_KEY), "\n".join(signed).encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        made = httpx.put(f"{self.url}/tests?restype=container", headers=headers, trust_env=False, timeout=2)
        return made.status_code in {httpx.codes.CREATED, httpx.codes.CONFLICT}


if __name__ == "__main__":
    AzuriteServer.install_or_warn()
