"""Files of an archive: layout of the batches, manifests, atomic publication, and verification.

    DIR/_archive.json                                 its division
    DIR/batch=k3f09a7c-000000012/day=2026-01-31/…     a batch's Parquet files
    DIR/_batches/k3f09a7c-000000012.json              its manifest
    DIR/_writing/                                     batches being written

A batch is one folder, so one rename makes all of it visible. Parquet readers ignore names that begin with `_`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from sluiceway.adapters.disk import make_directory, write_durably
from sluiceway.kernel.durability import sync_directory
from sluiceway.kernel.errors import SluicewayError, invalid

DIVISIONS = {"day": ("day",), "hour": ("day", "hour")}
"""Possible divisions of an archive, and their folders."""

_ABOUT, _MANIFESTS, _WRITING = "_archive.json", "_batches", "_writing"
_MANIFEST = re.compile(r"([0-9a-z]{8})-([0-9]{9})")


class Span(msgspec.Struct, frozen=True):
    """Items of one partition of the queue: their number, and the first and last offset."""

    items: int
    first: int
    last: int


class DataFile(msgspec.Struct, frozen=True):
    """A data file; `path` is relative to the batch's folder."""

    path: str
    items: int
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """Manifest of one batch. `digest` is over the items, independent of their order and files."""

    batch: str
    queue: str
    items: int
    digest: str
    partitions: dict[str, Span]
    files: list[DataFile]


class _About(msgspec.Struct, frozen=True):
    by: str


class Problem(msgspec.Struct, frozen=True):
    """A fault of that batch. `path` is relative to the archive."""

    batch: str
    path: str
    what: str


class Verified(msgspec.Struct):
    """Contents and faults of a whole archive."""

    batches: int = 0
    files: int = 0
    items: int = 0
    bytes: int = 0
    problems: list[Problem] = []


@dataclass(frozen=True, slots=True)
class Location:
    """Location of one batch in an archive. `writer` is the checkpoint's name, `number` Spark's batch number."""

    root: Path
    writer: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.writer}-{self.number:09}"

    @property
    def folder(self) -> Path:
        return self.root / f"batch={self.name}"

    @property
    def manifest(self) -> Path:
        return self.root / _MANIFESTS / f"{self.name}.json"

    @property
    def aside(self) -> Path:
        return self.root / _WRITING / self.name


def open_archive(root: Path, by: str) -> None:
    """Create the archive, or check that the existing one has this division. Raises `invalid_request`."""
    if by not in DIVISIONS:
        raise invalid("by", f"{by!r} is not one of {', '.join(DIVISIONS)}")
    about = root / _ABOUT
    if about.exists():
        known = _about(root).by
        if known != by:
            raise invalid("by", f"{root} is divided by {known}; pass that, or archive into another folder")
    elif root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise invalid("to", f"{root} exists and is not an archive; name a folder that is empty or does not exist")
    make_directory(root / _MANIFESTS)
    make_directory(root / _WRITING)
    if not about.exists():
        write_durably(about, msgspec.json.encode(_About(by)).decode())


def tidy(folder: Path) -> list[DataFile]:
    """Rename Spark's files to names that are the same in every run, make them durable, and list them. Removes all other files."""
    for extra in [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".parquet"]:
        extra.unlink()
    files: list[DataFile] = []
    # Deepest first: names are durable once their folder is, and so up to the top.
    for directory in sorted((folder, *(path for path in folder.rglob("*") if path.is_dir())), reverse=True):
        for number, path in enumerate(sorted(directory.glob("*.parquet"))):
            named = path.rename(directory / f"part-{number:05}.parquet")
            with named.open("rb") as file:
                os.fsync(file.fileno())
            files.append(_data_file(folder, named))
        sync_directory(directory)
    return sorted(files, key=lambda file: file.path)


def publish(location: Location) -> None:
    """Turn the written folder into the batch, replacing one left by an earlier run of the same batch."""
    if location.folder.exists():
        # Into the hidden folder first, since removing a folder is not atomic.
        gone = location.aside.with_name(f"{location.name}.replaced")
        shutil.rmtree(gone, ignore_errors=True)
        location.folder.rename(gone)
    location.aside.rename(location.folder)
    sync_directory(location.root)
    shutil.rmtree(location.aside.with_name(f"{location.name}.replaced"), ignore_errors=True)


def write_manifest(location: Location, manifest: Manifest) -> None:
    """The last step: from now on the batch is in the archive for good."""
    write_durably(location.manifest, msgspec.json.format(msgspec.json.encode(manifest), indent=2).decode())


def read_manifest(location: Location) -> Manifest | None:
    """The batch's manifest; None if it is missing or unreadable."""
    try:
        return msgspec.json.decode(location.manifest.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def is_whole(location: Location, manifest: Manifest) -> bool:
    """Whether the batch's files match the manifest, byte for byte."""
    return not any(_faults(location, manifest))


def verify(to: str | Path) -> Verified:
    """Check every file of an archive against its batch's manifest. Needs neither Spark nor a server, and changes nothing.

    Finds missing, changed or foreign files, damaged manifests, and missing batches followed by a later one of the same checkpoint. Raises
    `invalid_request` if there is no archive.
    """
    root = Path(to).expanduser().absolute()
    _about(root)
    found = Verified()
    numbers: dict[str, set[int]] = {}
    for path in sorted((root / _MANIFESTS).glob("*.json")):
        location = _location(root, path.stem)
        if location is None:
            continue
        numbers.setdefault(location.writer, set()).add(location.number)
        manifest = read_manifest(location)
        if manifest is None or manifest.batch != location.name or sum(file.items for file in manifest.files) != manifest.items:
            found.problems.append(Problem(location.name, _within(root, path), "the manifest is damaged"))
            continue
        found.batches += 1
        found.files += len(manifest.files)
        found.items += manifest.items
        found.bytes += sum(file.bytes for file in manifest.files)
        found.problems += _faults(location, manifest)
    found.problems += _without_manifest(root, numbers)
    return found


def _about(root: Path) -> _About:
    try:
        return msgspec.json.decode((root / _ABOUT).read_bytes(), type=_About)
    except FileNotFoundError:
        raise invalid("to", f"{root} is not an archive: it has no {_ABOUT}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid("to", f'{root / _ABOUT} cannot be read: {error}; write {{"by": "day"}} into it, or hour') from None


def _location(root: Path, name: str) -> Location | None:
    match = _MANIFEST.fullmatch(name)
    return Location(root, match[1], int(match[2])) if match else None


def _without_manifest(root: Path, numbers: Mapping[str, set[int]]) -> Iterator[Problem]:
    """Folders without a manifest, and gaps in the numbers."""
    folders = {path.name.removeprefix("batch="): path for path in root.glob("batch=*")}
    for name, path in sorted(folders.items()):
        location = _location(root, name)
        if location is None:
            yield Problem(name, path.name, "not of this archive")
        elif location.number not in numbers.get(location.writer, ()):
            yield Problem(
                name, path.name, "has no manifest: the job was stopped before it finished this batch, and finishes it when it resumes"
            )
    for writer, have in sorted(numbers.items()):
        for number in sorted(set(range(max(have))) - have):
            location = Location(root, writer, number)
            if location.name not in folders:
                yield Problem(location.name, location.folder.name, "is missing, with its manifest")


def _faults(location: Location, manifest: Manifest) -> Iterator[Problem]:
    """Differences between a batch's folder and its manifest."""
    there = {str(path.relative_to(location.folder)) for path in location.folder.rglob("*") if path.is_file()}
    for file in manifest.files:
        path = location.folder / file.path
        if what := "is missing" if file.path not in there else _changed(path, file):
            yield Problem(location.name, _within(location.root, path), what)
    for extra in sorted(there - {file.path for file in manifest.files}):
        yield Problem(location.name, _within(location.root, location.folder / extra), "is not in the manifest")


def _changed(path: Path, file: DataFile) -> str:
    size = path.stat().st_size
    if size != file.bytes:
        return f"is damaged: it has {size:,} bytes, and had {file.bytes:,}"
    return "" if _sha256(path) == file.sha256 else "is damaged: its bytes are not those that were written"


def _data_file(folder: Path, path: Path) -> DataFile:
    try:
        items = pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
        raise SluicewayError("internal", f"{path} was written and cannot be read: {error}") from error
    return DataFile(str(path.relative_to(folder)), items, path.stat().st_size, _sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _within(root: Path, path: Path) -> str:
    return str(path.relative_to(root))
