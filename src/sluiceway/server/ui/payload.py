"""Payloads and other texts of producers, made safe to display."""

from __future__ import annotations

import base64
import codecs
import unicodedata
from typing import Final, NamedTuple

from sluiceway.kernel.json_text import indented

PREVIEW: Final = 120
"""Characters of a payload that a list shows."""
_HEAD: Final = PREVIEW * 8
"""Base64 characters that are decoded for a preview: whole groups of four, enough for PREVIEW four-byte characters."""
WHOLE: Final = 8 << 10
"""Bytes of a payload that its own page shows."""
_PLAIN: Final = "\n\t"


class Payload(NamedTuple):
    """A payload for display: `text`, a `note` on how it is shown, and `size` in bytes."""

    text: str
    note: str
    size: int


def preview(encoded: str) -> Payload:
    """The first line for a list, of a payload in base64."""
    size = len(encoded) * 3 // 4 - encoded[-2:].count("=")
    data = base64.b64decode(encoded[:_HEAD])
    text = _utf8(data, is_whole=len(encoded) <= _HEAD)
    if text is None:
        return Payload(data[: PREVIEW // 3].hex(" "), "binary", size)
    line = visible(text[:PREVIEW]).replace("\n", " ").replace("\t", " ")
    return Payload(line + ("…" if len(text) > PREVIEW else ""), "", size)


def whole(encoded: str) -> Payload:
    """The payload for its own page, up to WHOLE bytes, of a payload in base64."""
    data = base64.b64decode(encoded)
    text = _utf8(data)
    cut = f"the first {WHOLE:,} of {len(data):,} bytes" if len(data) > WHOLE else ""
    if text is None:
        note = "not UTF-8, shown in hexadecimal"
        return Payload(_dump(data[:WHOLE]), f"{note}; {cut}" if cut else note, len(data))
    lines = None if cut else indented(data)
    if lines is not None and len(lines) <= 2 * WHOLE:
        return Payload(visible(lines.decode("utf-8")), "JSON, indented", len(data))
    return Payload(visible(data[:WHOLE].decode("utf-8", "ignore")), cut, len(data))


def editable(encoded: str) -> str | None:
    """The text that a form can change and send again; None: the payload, in base64, is not text, or is larger than a page shows."""
    data = base64.b64decode(encoded)
    text = _utf8(data)
    return None if text is None or len(data) > WHOLE or "\0" in text or "\r" in text else text


def visible(text: str) -> str:
    """The text with invisible and direction-changing characters escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each if each in _PLAIN or unicodedata.category(each) not in ("Cc", "Cf", "Cs", "Co", "Cn") else _escape(each) for each in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _utf8(data: bytes, *, is_whole: bool = True) -> str | None:
    """The decoded text, or None if it is not UTF-8. With `is_whole` false the data may end within a character."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=is_whole)
    except UnicodeDecodeError:
        return None


def _dump(data: bytes) -> str:
    """A hex dump: offset, sixteen bytes, and their ASCII characters per line."""
    lines = []
    for place in range(0, len(data), 16):
        row = data[place : place + 16]
        letters = "".join(chr(each) if 32 <= each < 127 else "·" for each in row)
        lines.append(f"{place:06x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)
