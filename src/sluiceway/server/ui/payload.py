"""Payloads, and other texts of whoever produced an item, as something to read: never more than that."""

from __future__ import annotations

import base64
import unicodedata
from typing import Final, NamedTuple

PREVIEW: Final = 120
"""Characters of a payload in a list."""
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
    data = base64.b64decode(encoded)
    text = _utf8(data)
    if text is None:
        return Payload(data[: PREVIEW // 3].hex(" "), "binary", len(data))
    line = visible(text[:PREVIEW]).replace("\n", " ").replace("\t", " ")
    return Payload(line + ("…" if len(text) > PREVIEW else ""), "", len(data))


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


def _utf8(data: bytes) -> str | None:
    try:
        return data.decode()
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
