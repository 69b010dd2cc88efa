"""Job mark in a checkpoint's folder: the job it belongs to, and a name that lasts as long as the checkpoint."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sluiceway.adapters.disk import make_directory, write_durably
from sluiceway.kernel.errors import invalid

_MARK = "sluiceway-job.json"


class _Mark(msgspec.Struct, frozen=True):
    job: str
    name: str
    of: dict[str, str]


def local_path(path: str | Path, field: str) -> Path:
    """A local or mounted folder. Raises `invalid_request` for the address of another file system."""
    text = str(path).removeprefix("file://")
    if "://" in text or not text:
        raise invalid(field, f"{text[:100]!r} is not a folder of this machine; renames must be atomic and durable there, so mount it")
    return Path(text).expanduser().absolute()


def claim(checkpoint: Path, job: str, of: Mapping[str, str]) -> str:
    """Return the checkpoint's name, created at its first use. Writes under it are distinguishable from those of other checkpoints.

    Raises `invalid_request` if the folder belongs to another job, or to this job with different values in `of`.
    """
    path = checkpoint / _MARK
    try:
        mark = msgspec.json.decode(path.read_bytes(), type=_Mark)
    except FileNotFoundError:
        if checkpoint.exists() and (not checkpoint.is_dir() or any(checkpoint.iterdir())):
            raise invalid(
                "checkpoint", f"{checkpoint} is not a checkpoint of this job; name a folder that is empty or does not exist"
            ) from None
        make_directory(checkpoint)
        mark = _Mark(job, secrets.token_hex(4), dict(of))
        write_durably(path, msgspec.json.encode(mark).decode())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid("checkpoint", f"{path} cannot be read: {error}; use a new checkpoint") from None
    if (mark.job, mark.of) != (job, dict(of)):
        told = ", ".join(f"{name} {value!r}" for name, value in mark.of.items())
        raise invalid("checkpoint", f"{checkpoint} is that of {mark.job} with {told}; use another one")
    return mark.name


def last_committed(checkpoint: Path) -> int:
    """The last batch in Spark's commit log, -1 if there is none: later ones run again at the next start."""
    return max((int(path.name) for path in (checkpoint / "commits").glob("[0-9]*") if path.name.isdigit()), default=-1)
