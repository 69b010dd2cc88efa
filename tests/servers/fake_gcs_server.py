"""A fake-gcs-server of the tests' own: an emulator of Google Cloud Storage, in memory, with a translator of uploads before it.

The library uploads by the XML API. fake-gcs-server takes no such uploads and ignores their conditions; in the JSON API it honours both.
So this tests the library's requests and the answers to them, and the emulator's conditions, but not that the service takes such an upload.

`python -m tests.servers.fake_gcs_server` builds its program from the Go module, unless there is one.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlencode, urlsplit

import httpx
import obstore.store

from sluiceway.adapters.storage.bucket_objects import BucketObjects
from tests.servers.program_server import TOOLS, ProgramServer

GENERATION, CONDITION = "x-goog-generation", "x-goog-if-generation-match"


class FakeGcsServer(ProgramServer):
    """It has one bucket, `tests`."""

    program = "fake-gcs-server"
    folder = TOOLS / "bin"
    installer = ("go", "install", "github.com/fsouza/fake-gcs-server@v1.56.1")
    installer_environment: ClassVar[Mapping[str, str]] = {"GOBIN": str(folder)}

    def __enter__(self) -> Self:
        super().__enter__()
        self._translator = _Translator(self.port)
        threading.Thread(target=self._translator.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._translator.shutdown()
        self._translator.server_close()
        super().__exit__(kind, error, trace)

    def objects(self, prefix: str) -> BucketObjects:
        """A folder of the bucket."""
        store = obstore.store.GCSStore(
            "tests",
            prefix=prefix,
            base_url=f"http://127.0.0.1:{self._translator.server_port}",
            bearer_token="tests",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        return BucketObjects(store)

    def _arguments(self) -> Sequence[str]:
        address = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-public-host", f"127.0.0.1:{self.port}"]
        return [*address, "-backend", "memory", "-log-level", "error"]

    def _environment(self) -> Mapping[str, str]:
        return {}

    def _is_ready(self) -> bool:
        made = httpx.post(f"http://127.0.0.1:{self.port}/storage/v1/b", json={"name": "tests"}, trust_env=False, timeout=2)
        return made.status_code in {httpx.codes.OK, httpx.codes.CONFLICT}


class _Translator(ThreadingHTTPServer):
    """Passes requests on to the emulator at that port, uploads as those of the JSON API."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, emulator: int) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange)
        self.emulator = emulator

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The slower of two hedged reads is given up.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Translator

    def do_PUT(self) -> None:
        bucket, _, name = urlsplit(self.path).path[1:].partition("/")
        query = {"uploadType": "media", "name": unquote(name)}
        if (generation := self.headers[CONDITION]) is not None:
            query["ifGenerationMatch"] = generation
        status, headers, body = self._ask("POST", f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}")
        if status == http.client.OK:
            stored = json.loads(body)
            headers, body = {"ETag": f'"{stored["etag"]}"', GENERATION: stored["generation"]}, b""
        self._answer(status, headers, body)

    def do_GET(self) -> None:
        self._answer(*self._ask(self.command, self.path))

    do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """No-op: the tests' output is not for requests."""

    def _ask(self, method: str, path: str) -> tuple[int, Mapping[str, str], bytes]:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        headers = {"Range": self.headers["Range"]} if self.headers["Range"] else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.emulator)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, text in headers.items():
            if name.lower() not in {"content-length", "connection", "transfer-encoding"}:
                self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    FakeGcsServer.install_or_warn()
