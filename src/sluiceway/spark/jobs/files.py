"""Input files of a job, and their format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from sluiceway.kernel.errors import invalid

CSV, JSON, PARQUET, TEXT = "csv", "json", "parquet", "text"
FORMATS = (CSV, JSON, PARQUET, TEXT)

EXTENSIONS = {
    ".csv": CSV,
    ".jsonl": JSON,
    ".ndjson": JSON,
    ".json": JSON,
    ".parquet": PARQUET,
    ".txt": TEXT,
    ".text": TEXT,
    ".log": TEXT,
}
_PATTERN = re.compile(r"([\\{}\[\]*?])")
_COMPRESSED = (".gz", ".bz2", ".zst")


def files_of(given: str) -> list[Path]:
    """The file, or all files in the folder, in order of name. Raises `invalid_request` if there are none."""
    path = Path(given).expanduser().absolute()
    if not path.exists():
        raise invalid("input", f"there is no file or folder {given}")
    files = sorted(visible(path)) if path.is_dir() else [path]
    if not files:
        raise invalid("input", f"the folder {given} is empty")
    return files


def visible(folder: Path) -> Iterator[Path]:
    """The files that Spark would read: names that begin with a dot or an underscore are ignored."""
    for entry in folder.iterdir():
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            yield from visible(entry)
        else:
            yield entry


def format_of(files: Iterable[Path], what: str) -> str:
    """The common format of these files, by their extensions. Raises `invalid_request` that says what was expected."""
    formats = {_format(file): file for file in files}
    if None in formats:
        raise invalid(
            "input", f"cannot tell the format of {formats[None].name} from its name; known extensions are {', '.join(EXTENSIONS)}"
        )
    if len(formats) > 1:
        examples = " and ".join(file.name for file in formats.values())
        raise invalid("input", f"{what} has files of different kinds ({examples}); give one file, or a folder of one kind")
    return str(next(iter(formats)))


def check_lines(files: Iterable[Path]) -> None:
    """Raises `invalid_request` for a pretty-printed JSON document, which would be read as hundreds of malformed lines."""
    for file in files:
        if file.suffix.lower() in _COMPRESSED:
            continue
        with file.open("rb") as lines:
            first = next((line.strip() for line in lines if line.strip()), b"")
        if first in (b"{", b"["):
            raise invalid("input", f"{file.name} is one JSON document, not JSON lines: every line must be an object of its own")


def check_names(paths: Iterable[Path]) -> None:
    """Raises `invalid_request` for a path that contains pattern characters: Spark treats paths as patterns, in places even escaped ones."""
    for path in paths:
        if _PATTERN.search(str(path)):
            raise invalid("input", f"Spark cannot read {path}, which has one of {{ }} [ ] * ? \\ in it; give it another name")


def _format(file: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return EXTENSIONS.get(suffixes[-1]) if suffixes else None
