"""Secrets by reference: configuration names an environment variable or a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sluiceway.kernel.errors import invalid

_SHOWN = 80


def read_secret(text: str, field: str, environment: Mapping[str, str], folder: Path = Path(), note: str = "") -> str | None:
    """Resolve `env:NAME` or `file:PATH` (relative to `folder`); None: the text is neither. Never empty.

    Raises `invalid_request` that names the field, ends with the note, and reveals nothing of a secret.
    """
    how, separator, where = text.partition(":")
    if separator and how == "env":
        if not environment.get(where):
            raise invalid(field, f"the environment variable {where[:_SHOWN]!r} is not set{note}")
        return environment[where]
    if separator and how == "file":
        path = folder / where
        try:
            secret = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise invalid(field, f"the file {path} cannot be read: {reason}{note}") from None
        if not secret:
            raise invalid(field, f"the file {path} is empty{note}")
        return secret
    return None
