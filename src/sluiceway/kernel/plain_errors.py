"""What the decoding library says of a wrong value, in the words of JSON."""

from __future__ import annotations

import re

_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "bytes": "base64",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_TYPE = re.compile(r"Expected `([^`]*)`(.*)$", re.DOTALL)
_GOT = re.compile(r", got `(\w+)`$")
_BOUND = re.compile(r" (of length )?(<=|>=|<|>|==) (-?[\d.]+)$")
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than", "==": "exactly"}
_UNITS = {"str": "characters", "bytes": "bytes", "array": "elements", "object": "members"}


def plain_error(message: str) -> str:
    """Rewrite a message of msgspec, without its path: "Expected `int` <= 1000" becomes "expected an integer, at most 1000"."""
    found = _TYPE.match(message)
    if found is None:
        return message[:1].lower() + message[1:]
    names = found[1].split(" | ")
    expected = "expected " + " or ".join(_NAMES.get(name, name) for name in names)
    rest = found[2]
    if got := _GOT.fullmatch(rest):
        return f"{expected}, not {_NAMES.get(got[1], got[1])}"
    if bound := _BOUND.fullmatch(rest):
        unit = f" {_UNITS.get(names[0], 'long')}" if bound[1] else ""
        number = f"{int(bound[3]):,}" if bound[3].lstrip("-").isdigit() else bound[3]
        return f"{expected}, {_BOUNDS[bound[2]]} {number}{unit}"
    return expected + rest
