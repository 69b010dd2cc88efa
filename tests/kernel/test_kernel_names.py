from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_TEXT_BYTES
from sluiceway.kernel.names import check_queue_name, check_text

FIRST = string.ascii_letters + string.digits + "_"
ALLOWED = FIRST + ".-"


@given(st.sampled_from(FIRST), st.text(alphabet=ALLOWED, max_size=127))
def test_a_queue_name_is_taken_as_it_is(first: str, rest: str) -> None:
    assert check_queue_name(first + rest) == first + rest


@given(st.text(alphabet=ALLOWED, max_size=10), st.characters(exclude_characters=ALLOWED), st.text(alphabet=ALLOWED, max_size=10))
def test_any_other_character_is_refused(before: str, other: str, after: str) -> None:
    with pytest.raises(SluicewayError) as caught:
        check_queue_name(before + other + after)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "queue_name")


@pytest.mark.parametrize("name", [".", "..", ".hidden", "-flag", "a" * 129, "a\n", "a/b"])
def test_a_name_that_could_mislead_is_refused(name: str) -> None:
    with pytest.raises(SluicewayError, match="is not a queue name"):
        check_queue_name(name)


@pytest.mark.parametrize("name", ["", None, 7, b"jobs"])
def test_a_queue_name_is_required(name: object) -> None:
    with pytest.raises(SluicewayError, match="dead_queue: a queue name is required"):
        check_queue_name(name, "dead_queue")


@pytest.mark.parametrize("text", ["", "a" * MAX_TEXT_BYTES, "é" * (MAX_TEXT_BYTES // 2)])
def test_a_text_within_the_limit_is_taken_as_it_is(text: str) -> None:
    assert check_text(text, "reason") == text


@pytest.mark.parametrize("text", ["a" * (MAX_TEXT_BYTES + 1), "é" * (MAX_TEXT_BYTES // 2) + "a"])
def test_a_text_is_measured_in_bytes(text: str) -> None:
    with pytest.raises(SluicewayError, match=f"reason: longer than {MAX_TEXT_BYTES} bytes"):
        check_text(text, "reason")


@pytest.mark.parametrize("value", [None, 7, b"a"])
def test_a_text_is_a_string(value: object) -> None:
    with pytest.raises(SluicewayError, match="reason: expected a string"):
        check_text(value, "reason")
