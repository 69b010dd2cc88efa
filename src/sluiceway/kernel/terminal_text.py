"""Texts of others, for a terminal or a log: nothing in them moves the cursor, hides what follows, or reverses the order of characters."""

from __future__ import annotations


def escaped(text: str) -> str:
    """The text with escapes in place of what is not printable, line ends included."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text)


def plain(text: str) -> str:
    """The same for each line of the text, which keeps its line ends."""
    return "\n".join(map(escaped, text.split("\n")))
