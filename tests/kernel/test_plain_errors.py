"""What is said of wrong values of the JSON that clients send."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest

from sluiceway.kernel.plain_errors import plain_error


class Given(msgspec.Struct):
    count: Annotated[int, msgspec.Meta(le=1_000)] = 0
    text: Annotated[str, msgspec.Meta(max_length=5)] | None = None
    items: Annotated[list[int], msgspec.Meta(min_length=1)] = msgspec.field(default_factory=lambda: [1])
    kind: Annotated[str, msgspec.Meta(pattern="^a+$")] = "a"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"count": 1_001}, "expected an integer, at most 1,000"),
        ({"count": "1"}, "expected an integer, not a string"),
        ({"count": None}, "expected an integer, not null"),
        ({"text": 3}, "expected a string or null, not an integer"),
        ({"text": "abcdef"}, "expected a string, at most 5 characters"),
        ({"items": []}, "expected an array, at least 1 elements"),
        ({"items": {}}, "expected an array, not an object"),
        ({"kind": "b"}, "expected a string matching regex '^a+$'"),
        ([], "expected an object, not an array"),
    ],
)
def test_a_wrong_value_is_described_in_the_words_of_json(given: Any, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(given, Given)
    assert plain_error(str(refused.value).partition(" - at")[0]) == said


def test_other_messages_are_kept() -> None:
    assert plain_error("Invalid enum value 'x'") == "invalid enum value 'x'"
