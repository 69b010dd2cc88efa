"""Payloads, and other texts of whoever produced an item, as something to read: never more than that."""

from __future__ import annotations

import base64
import codecs
import unicodedata
from typing import Final, NamedTuple

PREVIEW: Final = 120
"""Characters of a payload in a list."""
_HEAD: Final = PREVIEW * 8
"""Of its base64, what is decoded for that: whole groups of four, and more than so many characters of four bytes take."""
WHOLE: Final = 8 << 10
"""Bytes of a payload that are shown where it is alone."""
_PLAIN: Final = "\n\t"


class Payload(NamedTuple):
    """`text` is what is shown of it, `note` what has to be said about that."""

    text: str
    note: str
    size: int


def preview(encoded: str) -> Payload:
    """A line of it, for a list."""
    size = len(encoded) * 3 // 4 - encoded[-2:].count("=")
    data = base64.b64decode(encoded[:_HEAD])
    text = _utf8(data, is_whole=len(encoded) <= _HEAD)
    if text is None:
        return Payload(data[: PREVIEW // 3].hex(" "), "binary", size)
    line = visible(text[:PREVIEW]).replace("\n", " ").replace("\t", " ")
    return Payload(line + ("…" if len(text) > PREVIEW else ""), "", size)


def whole(encoded: str) -> Payload:
    """As much of it as one page may have."""
    data = base64.b64decode(encoded)
    text = _utf8(data)
    cut = f"the first {WHOLE:,} of {len(data):,} bytes" if len(data) > WHOLE else ""
    if text is None:
        note = "not UTF-8, so it is shown as bytes in hexadecimal"
        return Payload(_dump(data[:WHOLE]), f"{note}; {cut}" if cut else note, len(data))
    return Payload(visible(data[:WHOLE].decode("utf-8", "ignore")), cut, len(data))


def visible(text: str) -> str:
    """The text with an escape in place of each character that cannot be seen, or changes how others are (such as the writing direction)."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each if each in _PLAIN or unicodedata.category(each) not in ("Cc", "Cf", "Cs", "Co", "Cn") else _escape(each) for each in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _utf8(data: bytes, *, is_whole: bool = True) -> str | None:
    """The text; one that is not whole may end within a character."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=is_whole)
    except UnicodeDecodeError:
        return None


def _dump(data: bytes) -> str:
    """Sixteen bytes a line, with their place before and what is ASCII behind."""
    lines = []
    for place in range(0, len(data), 16):
        row = data[place : place + 16]
        letters = "".join(chr(each) if 32 <= each < 127 else "·" for each in row)
        lines.append(f"{place:06x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)
