"""Bit maps as they are stored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from sluiceway.core.partition.records import pack, pack_bits, unpack_bits, unpack_due

MEMBERS = st.one_of(
    st.sets(st.integers(0, 20_000)),
    st.builds(
        lambda first, count, step: set(range(first, first + count * step, step)),
        st.integers(0, 1 << 31),
        st.integers(0, 9_000),
        st.integers(1, 9),
    ),
)


@given(MEMBERS)
def test_bits_come_back_whatever_form_they_took(members: set[int]) -> None:
    bits = BitMap(members)
    data = pack_bits(bits)
    assert unpack_bits(data) == bits
    assert len(data) <= len(bits.serialize())


@given(MEMBERS)
def test_bits_that_were_written_before_there_were_two_forms_are_read(members: set[int]) -> None:
    bits = BitMap(members)
    assert unpack_bits(bits.serialize()) == bits


def test_every_other_item_of_a_large_lease_takes_a_bit_each() -> None:
    assert len(pack_bits(BitMap(range(0, 10_000, 2)))) < 1_300
    assert len(pack_bits(BitMap(range(10_000)))) < 30


def test_a_scheduled_record_from_before_leases_backed_off_is_read() -> None:
    due = unpack_due(pack((1_000, 7, pack_bits(BitMap([3])), 2, 5_000)))
    assert (due.due_at, due.blob, due.attempts, due.expires_at, due.max_lease_size) == (1_000, 7, 2, 5_000, 0)
