"""Fetches what the dashboard and its tests have from others: `python tools/assets.py`. It needs Python 3.11 and nothing else.

`assets.lock.json` says what is fetched from the registry of npm (another one: `npm_config_registry`). To change a version, take `integrity`
from `npm view NAME@VERSION dist.integrity`.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import os
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
LOCK = Path(__file__).with_name("assets.lock.json")
REGISTRY = "https://registry.npmjs.org"
SOURCE = "SOURCE"
"""The file beside the others that says where they are from."""
ATTEMPTS = 5
TIMEOUT = 60.0
"""Seconds for which a registry may be silent."""
LARGEST = 32 << 20
"""Bytes of a package; no registry fills the memory."""


class AssetError(Exception):
    """Why a package is not there."""


@dataclass(frozen=True)
class Package:
    """Some files of one version of a package, and the directory that they go to, which holds nothing else."""

    package: str
    version: str
    integrity: str
    """The whole package's SHA-512, as registries write it."""
    files: tuple[str, ...]
    to: str

    @property
    def source(self) -> str:
        return f"{self.package} {self.version}\n{self.integrity}\n"

    def names(self) -> dict[str, str]:
        """The files by their names in the directory."""
        return {PurePosixPath(file).name: file for file in self.files}


def locked(lock: Path = LOCK) -> list[Package]:
    """What the lock file names."""
    return [Package(**{**entry, "files": tuple(entry["files"])}) for entry in json.loads(lock.read_text())]


def registry() -> str:
    """Where packages are from."""
    names = ("npm_config_registry", "NPM_CONFIG_REGISTRY")
    return next((os.environ[name] for name in names if os.environ.get(name)), REGISTRY).rstrip("/")


def fetch(package: Package, root: Path = ROOT, pause: float = 1.0) -> bool:
    """Puts a package's files into their directory under `root`, all or none; whether there was anything to do. Raises AssetError.

    `pause`: seconds before the second attempt, twice as long before each further one.
    """
    place = root / package.to
    if _up_to_date(package, place):
        return False
    name = f"{package.package} {package.version}"
    content = _download(f"{registry()}/{package.package}/-/{package.package}-{package.version}.tgz", pause)
    if "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode() != package.integrity:
        raise AssetError(f"{name}: {registry()} gave something else than {LOCK.name} asks for (integrity)")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=place.parent) as directory:
        made = Path(directory) / "made"
        made.mkdir()
        for to, file in package.names().items():
            (made / to).write_bytes(_member(content, file, name))
        (made / SOURCE).write_text(package.source)
        try:
            if place.exists():
                place.rename(Path(directory) / "old")
            made.rename(place)
        except OSError:
            # Somebody else was faster, who has put the same there or else has not.
            if not _up_to_date(package, place):
                raise
    return True


def fetch_all(under: str = "", root: Path = ROOT) -> None:
    """Whatever the lock file wants in directories that begin so. Raises AssetError."""
    for package in locked():
        if package.to.startswith(under) and fetch(package, root):
            print(f"Assets: {package.package} {package.version}", file=sys.stderr)


def _up_to_date(package: Package, place: Path) -> bool:
    try:
        return (place / SOURCE).read_text() == package.source and {path.name for path in place.iterdir()} == {*package.names(), SOURCE}
    except OSError:
        return False


def _download(url: str, pause: float) -> bytes:
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                content: bytes = answer.read(LARGEST + 1)
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            if error.code < 500 and error.code not in {408, 429}:
                break
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        else:
            if len(content) > LARGEST:
                raise AssetError(f"{url}: more than {LARGEST >> 20} MiB")
            return content
    raise AssetError(f"{url}: {reason}. Behind a proxy set https_proxy, for a registry of your own npm_config_registry.")


def _member(content: bytes, file: str, name: str) -> bytes:
    """A file of a package, whose directory can have any name."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            if member.isfile() and member.name.partition("/")[2] == file:
                opened = archive.extractfile(member)
                assert opened is not None
                return opened.read()
    raise AssetError(f"{name} has no {file}")


if __name__ == "__main__":
    try:
        fetch_all()
    except AssetError as error:
        sys.exit(f"assets: {error}")
