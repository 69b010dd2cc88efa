"""A real versitygw of the tests' own: an S3 gateway over a folder.

`python -m tests.servers.versity_server` builds its program from the Go module, unless there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from sluiceway.adapters.storage.bucket_objects import BucketObjects, in_s3
from tests.servers.program_server import TOOLS, ProgramServer

REGION, KEY_ID, SECRET = "none", "tests", "tests"


class VersityServer(ProgramServer):
    """It has one bucket, `tests`. Its conditional writes are atomic: each holds a lock on the name."""

    program = "versitygw"
    folder = TOOLS / "bin"
    installer = ("go", "install", "github.com/versity/versitygw/cmd/versitygw@v1.8.0")
    installer_environment: ClassVar[Mapping[str, str]] = {"GOBIN": str(folder)}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def objects(self, prefix: str) -> BucketObjects:
        """A folder of the bucket."""
        return in_s3("tests", prefix, region=REGION, endpoint=self.url, access_key_id=KEY_ID, secret_access_key=SECRET)

    def _arguments(self) -> Sequence[str]:
        (self._directory / "data/tests").mkdir(parents=True)
        (self._directory / "about").mkdir()
        # Not in extended attributes, which not every file system has.
        backend = ["posix", "--sidecar", str(self._directory / "about"), str(self._directory / "data")]
        return ["--port", f"127.0.0.1:{self.port}", "--region", REGION, "--keep-alive", "--quiet", *backend]

    def _environment(self) -> Mapping[str, str]:
        return {"ROOT_ACCESS_KEY": KEY_ID, "ROOT_SECRET_KEY": SECRET}


if __name__ == "__main__":
    VersityServer.install_or_warn()
