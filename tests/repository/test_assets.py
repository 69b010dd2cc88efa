"""What the dashboard has from others: fetched as the lock file says or not at all, and inside the wheel."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import assets


class Registry:
    """A registry over HTTP: `content` by path, after as many 503s as `failures` says. `asked` is what was asked for."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.failures = 0
        self.asked: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.asked.append(self.path)
                status = 200 if self.path in registry.content else 404
                if registry.failures:
                    registry.failures -= 1
                    status = 503
                body = registry.content[self.path] if status == 200 else b""
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    made = Registry()
    monkeypatch.setenv("npm_config_registry", made.url + "/")
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def published(registry: Registry, version: str, files: dict[str, str]) -> assets.Package:
    """A version of a package, all of whose files are wanted."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    content = packed.getvalue()
    registry.content[f"/thing/-/thing-{version}.tgz"] = content
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    return assets.Package("thing", version, integrity, tuple(files), "vendor/thing")


def held(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (root / "vendor" / "thing").iterdir() if path.name != assets.SOURCE}


def test_fetched_once(registry: Registry, tmp_path: Path) -> None:
    package = published(registry, "1.0", {"dist/thing.js": "one", "LICENSE": "free"})
    assert assets.fetch(package, tmp_path)
    assert held(tmp_path) == {"thing.js": "one", "LICENSE": "free"}
    assert not assets.fetch(package, tmp_path)
    assert len(registry.asked) == 1
    # A directory that is not whole is made anew, and nothing is left beside it.
    (tmp_path / "vendor" / "thing" / "thing.js").unlink()
    assert assets.fetch(package, tmp_path)
    assert held(tmp_path) == {"thing.js": "one", "LICENSE": "free"}
    assert [path.name for path in (tmp_path / "vendor").iterdir()] == ["thing"]


def test_another_version_takes_the_place(registry: Registry, tmp_path: Path) -> None:
    assets.fetch(published(registry, "1.0", {"thing.js": "one", "old.js": "gone"}), tmp_path)
    assert assets.fetch(published(registry, "2.0", {"thing.js": "two"}), tmp_path)
    assert held(tmp_path) == {"thing.js": "two"}


def test_what_the_lock_file_does_not_ask_for_is_not_taken(registry: Registry, tmp_path: Path) -> None:
    old = published(registry, "1.0", {"thing.js": "one"})
    assets.fetch(old, tmp_path)
    with pytest.raises(assets.AssetError, match=r"thing 2\.0.*integrity"):
        assets.fetch(replace(published(registry, "2.0", {"thing.js": "two"}), integrity=old.integrity), tmp_path)
    missing = replace(published(registry, "3.0", {"thing.js": "three"}), files=("thing.js", "LICENSE"))
    with pytest.raises(assets.AssetError, match=r"thing 3\.0 has no LICENSE"):
        assets.fetch(missing, tmp_path)
    assert held(tmp_path) == {"thing.js": "one"}
    assert [path.name for path in (tmp_path / "vendor").iterdir()] == ["thing"]


def test_asks_again_when_that_may_help(registry: Registry, tmp_path: Path) -> None:
    package = published(registry, "1.0", {"thing.js": "one"})
    registry.failures = assets.ATTEMPTS - 1
    assert assets.fetch(package, tmp_path, pause=0.001)
    assert len(registry.asked) == assets.ATTEMPTS


def test_says_what_it_could_not_have(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = published(registry, "1.0", {"thing.js": "one"})
    with pytest.raises(assets.AssetError, match=r"thing-9\.tgz: HTTP 404"):
        assets.fetch(replace(package, version="9"), tmp_path, pause=0.001)
    assert len(registry.asked) == 1
    registry.failures = 100
    with pytest.raises(assets.AssetError, match=r"HTTP 503.*npm_config_registry"):
        assets.fetch(package, tmp_path, pause=0.001)
    assert len(registry.asked) == 1 + assets.ATTEMPTS


def build(source: Path, kind: str, into: Path) -> Path:
    """Without the network: what is fetched already is not fetched again."""
    environment = {**os.environ, "npm_config_registry": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(into)]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(into.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def test_the_wheel_holds_all_of_it_with_its_licences(repository: Path, tmp_path: Path) -> None:
    wanted = [package for package in assets.locked() if package.to.startswith("src/")]
    assert all("LICENSE" in package.files for package in wanted)
    places = {f"{package.to}/{name}".removeprefix("src/") for package in wanted for name in package.names()}
    # From a source distribution, as whoever packages it would.
    with tarfile.open(build(repository, "sdist", tmp_path)) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    built = build(source, "wheel", tmp_path)
    assert built.stat().st_size <= 1_400_000
    with zipfile.ZipFile(built) as wheel:
        tops = {name.partition("/")[0] for name in wheel.namelist()}
        assert {name for name in tops if not name.endswith(".dist-info")} == {"sluiceway", "pyspark_sluiceway", "pyspark_sluiceway_capture"}
        assert places <= set(wheel.namelist())
        for place in places:
            assert wheel.read(place) == (repository / "src" / place).read_bytes()
        assert not [name for name in wheel.namelist() if "axe" in name]
