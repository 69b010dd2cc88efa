from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import INCARNATION_ALPHABET, INCARNATION_LENGTH, ItemId, LeaseId, parse_item_id, parse_lease_id

INCARNATIONS = st.text(alphabet=INCARNATION_ALPHABET, min_size=INCARNATION_LENGTH, max_size=INCARNATION_LENGTH)
PARTITIONS = st.integers(0, 10**9 - 1)


@given(INCARNATIONS, PARTITIONS, st.integers(0, 10**18 - 1))
def test_an_item_id_survives_the_round_trip(incarnation: str, partition: int, offset: int) -> None:
    item = ItemId(incarnation, partition, offset)
    assert parse_item_id(str(item)) == item


@given(INCARNATIONS, PARTITIONS, st.integers(0, 10**17 - 1))
def test_a_lease_id_survives_the_round_trip(incarnation: str, partition: int, number: int) -> None:
    lease = LeaseId(incarnation, partition, number)
    assert parse_lease_id(str(lease)) == lease


def test_the_forms_are_those_of_the_contract() -> None:
    assert str(ItemId("k7f3q2ma", 2, 1042)) == "k7f3q2ma.2.1042"
    assert str(LeaseId("k7f3q2ma", 2, 17)) == "k7f3q2ma.2.L17"


def test_the_alphabet_has_no_look_alikes() -> None:
    assert not set("l1o0") & set(INCARNATION_ALPHABET)
    assert len(set(INCARNATION_ALPHABET)) == len(INCARNATION_ALPHABET)


@pytest.mark.parametrize(
    "text",
    [
        *("", "k7f3q2ma", "k7f3q2ma.0", "k7f3q2ma.0.", "k7f3q2ma..1", "k7f3q2ma.0.1.2", "k" * 80),
        *("k7f3q2ma.-1.1", "k7f3q2ma.0.-1", "k7f3q2ma.0.L1", "k7f3q2ma.x.1", "k7f3q2ma.0.1\n", "k7f3q2ma.٣.1", "k7f3q2ma.0.٣"),
        *("k7f3q2ma.0." + "9" * 19, "k7f3q2ma." + "9" * 10 + ".1"),
    ],
)
def test_what_is_no_item_id_is_refused_by_field(text: str) -> None:
    with pytest.raises(SluicewayError, match="is not an item id") as caught:
        parse_item_id(text)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "ids")


@pytest.mark.parametrize(
    "text", ["", "k7f3q2ma.0.17", "k7f3q2ma.0.L", "k7f3q2ma.0.l17", "k7f3q2ma.0.L-1", "k7f3q2ma.0.LL1", "k7f3q2ma.0.L1\n"]
)
def test_what_is_no_lease_id_is_refused_by_field(text: str) -> None:
    with pytest.raises(SluicewayError, match="is not a lease id") as caught:
        parse_lease_id(text)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "lease_ids")


@pytest.mark.parametrize("value", [None, 7, ("k7f3q2ma", 0, 1), b"k7f3q2ma.0.1"])
def test_an_id_is_a_string(value: object) -> None:
    with pytest.raises(SluicewayError):
        parse_item_id(value)
    with pytest.raises(SluicewayError):
        parse_lease_id(value)


@given(st.text(max_size=80))
@example("\U000119e5" * 64)
def test_an_id_is_read_or_refused(text: str) -> None:
    for parse in (parse_item_id, parse_lease_id):
        try:
            _, partition, number = parse(text)
        except SluicewayError as error:
            assert len(error.detail) < 200
        else:
            assert 0 <= partition < 10**9
            assert 0 <= number < 10**18
