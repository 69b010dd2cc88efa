"""Large resources and plans are packed: nothing is lost by it, and a hundred thousand partitions fit into a commit."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.group import run_group
from sluiceway.core.group import group_records
from sluiceway.core.group.group_records import (
    MAX_MEMBERS,
    MAX_NAMES,
    MAX_PLAIN,
    PACKED,
    Keys,
    Pin,
    Plan,
    Resource,
    decode_record,
    encode_record,
    largest_commit,
)
from sluiceway.core.group.packed_items import (
    FEW_MEMBERS,
    PackedNames,
    PackedOwners,
    pack_names,
    pack_owners,
    packed_size,
    unpack_names,
    unpack_owners,
)
from sluiceway.model.meta import MAX_COMMIT_BYTES

KEYS = Keys("partitions")

partitions = st.builds(lambda stem, number: f"{stem}.{number}", st.sampled_from(["q", "k7f3q2ma", "", "a.b"]), st.integers(0, 10**10))
odd = st.sampled_from(["q.01", "q.", "q.-1", ".", "0", "q.1_0", "q.١", "q.²", "q.+3", "q. 4", "7"])
names = partitions | odd | st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20)
members = st.sampled_from(["a", "b", "c", "d"])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Each item has at most one owner, and up to four members may still serve it."""
    owners: dict[str, dict[str, int]] = {}
    waits: dict[str, list[str]] = {}
    for item in sorted(draw(st.sets(names, min_size=1, max_size=30))):
        owner = draw(st.none() | members)
        if owner is not None:
            owners.setdefault(owner, {})[item] = draw(st.integers(0, 2**32 - 1))
        for name in draw(st.sets(members)):
            waits.setdefault(name, []).append(item)
    return Plan(round=9, era=2, resource_version=3, owners=owners, waits={name: tuple(items) for name, items in waits.items()}, swapped=4)


@given(st.sets(names))
def test_names_come_back(some: set[str]) -> None:
    found = unpack_names(pack_names(some))
    assert len(found) == len(some)
    assert {*found} == some


def test_names_of_partitions_are_ranges() -> None:
    some = [f"q.{number}" for number in (*range(1_000), 2_000, *range(5_000, 5_003))] + ["x.7", "x.07"]
    assert pack_names(some) == PackedNames({"q": [0, 1_000, 1_000, 1, 2_999, 3], "x": [7, 1]}, ["x.07"])


@given(plans())
def test_a_plan_comes_back(plan: Plan) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_records, "MAX_PLAIN", 0)
        stored = encode_record(plan)
    assert stored.startswith(PACKED)
    assert decode_record(stored, Plan) == plan


@given(plans(), st.data())
def test_a_packed_plan_is_no_larger_than_its_bound(plan: Plan, data: st.DataObject) -> None:
    owned = {item for grants in plan.owners.values() for item in grants}
    # Up to two members may still serve an item.
    waits = {name: items for name, items in plan.waits.items() if name in ("a", "b")}
    packed = pack_owners(plan.owners, waits)
    assert packed is not None
    assert not packed.more
    gone = {item for items in waits.values() for item in items} - owned
    extra = data.draw(st.sets(names, max_size=5))
    size = len(msgspec.msgpack.encode(packed)) - len(msgspec.msgpack.encode(packed.members))
    # Beside it, what heads the arrays.
    assert size <= packed_size(owned, gone | extra) + 16


@given(st.sets(names), st.dictionaries(names, st.integers(1, 9)), st.dictionaries(names, st.just(Pin(zone="east"))))
def test_a_resource_comes_back(items: set[str], limits: dict[str, int], pins: dict[str, Pin]) -> None:
    resource = Resource(items=tuple(sorted(items)), limits=limits, pins=pins, era=7, version=8, load_moves=0, strategy="claims")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_records, "MAX_PLAIN", 0)
        assert decode_record(encode_record(resource), Resource) == resource


def test_a_large_record_is_packed_without_being_written_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [f"{number}" for number in range(MAX_PLAIN // 3 + 1)]
    for record in (Resource(items=tuple(sorted(some))), Plan(round=9, era=2, resource_version=3, owners={"a": dict.fromkeys(some, 1)})):
        plain = msgspec.json.encode(record)
        assert len(plain) > MAX_PLAIN
        written: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(msgspec.json, "encode", written.append)
            stored = encode_record(record)
        assert not written
        assert stored.startswith(PACKED)
        assert decode_record(stored, type(record)) == record


def packed_or_not(record: msgspec.Struct) -> bool:
    stored = encode_record(record)
    assert decode_record(stored, type(record)) == record
    return stored.startswith(PACKED)


def plan_of(owners: Iterable[tuple[str, str, int]], **waits: tuple[str, ...]) -> Plan:
    found: dict[str, dict[str, int]] = {}
    for member, item, grant in owners:
        found.setdefault(member, {})[item] = grant
    return Plan(round=1, era=1, resource_version=1, owners=found, waits=waits)


def test_small_records_and_what_packing_would_change_stay_json() -> None:
    few, many = [f"q.{number}" for number in range(100)], [f"q.{number}" for number in range(5_000)]
    assert not packed_or_not(Resource(items=tuple(few)))
    assert packed_or_not(Resource(items=tuple(sorted(many))))
    assert not packed_or_not(Resource(items=tuple(many))), "not sorted"
    assert packed_or_not(plan_of(("m", item, 1) for item in many))
    assert not packed_or_not(plan_of(("m", item, 2**32) for item in many))
    assert not packed_or_not(plan_of((name, item, 1) for item in many for name in "ab")), "each has two owners"
    assert not packed_or_not(plan_of((("m", item, 1) for item in many), a=("q.2", "q.1"))), "not sorted"
    assert packed_or_not(plan_of((("m", item, 1) for item in many), **dict.fromkeys("abcde", ("q.1", "q.2", "z"))))


@pytest.mark.parametrize(("members", "bits"), [(FEW_MEMBERS, 10), (FEW_MEMBERS + 1, 20)])
def test_a_plan_of_many_members_has_wider_cells(members: int, bits: int) -> None:
    crowd, many = [f"member-{number:04}" for number in range(members)], [f"q.{number}" for number in range(5_000)]
    waits = {name: tuple(sorted(("q.1", "q.7", f"q.{at}"))) for at, name in enumerate(crowd[-50:], 100)}
    plan = plan_of(zip(itertools.cycle(crowd), many, itertools.count(), strict=False), **waits)
    packed = pack_owners(plan.owners, plan.waits)
    assert packed is not None
    assert packed.bits == bits
    assert packed_or_not(plan)


def test_a_large_record_of_before_opens() -> None:
    items = tuple(sorted(f"q.{number}" for number in range(5_000)))
    for record in (Resource(items=items), plan_of(("m", item, 1) for item in items)):
        stored = msgspec.json.encode(record)
        assert len(stored) > MAX_PLAIN
        assert decode_record(stored, type(record)) == record


@pytest.mark.parametrize("kind", [Plan, Resource])
@pytest.mark.parametrize("data", [b"", b"not compressed", zlib.compress(b"\xc1"), zlib.compress(msgspec.msgpack.encode([1, 2]))])
def test_a_malformed_record_is_no_other_error(kind: type[Plan] | type[Resource], data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_record(PACKED + data, kind)


@pytest.mark.parametrize(
    "packed",
    [
        PackedOwners(PackedNames({}, ["x"]), ["a"], 10, b"", b"", {}),
        PackedOwners(PackedNames({}, ["x"]), ["a"], 10, b"\2\0\0\0", bytes(4), {}),
        PackedOwners(PackedNames({}, ["x"]), ["a"], 11, bytes(4), bytes(4), {}),
        PackedOwners(PackedNames({"q": [1]}, []), ["a"], 10, bytes(4), bytes(4), {}),
    ],
)
def test_owners_that_do_not_fit_together_are_malformed(packed: PackedOwners) -> None:
    with pytest.raises(ValueError, match=r"fit together|argument 2 is"):
        unpack_owners(packed)


def test_a_hundred_thousand_partitions_fit_into_a_commit() -> None:
    """While each of them moves, between members whose names are as long as they may get."""
    items = [f"k7f3q2{queue:02}.{number}" for queue in range(100) for number in range(1_000)]
    crowd = [f"{number:04}".ljust(MAX_NAMES // MAX_MEMBERS, "-") for number in range(MAX_MEMBERS)]
    assert largest_commit(KEYS, items, items) <= MAX_COMMIT_BYTES
    assert len(encode_record(Resource(items=tuple(sorted(items))))) < 10_000
    half = len(crowd) // 2
    owners: dict[str, dict[str, int]] = {}
    waits: dict[str, list[str]] = {}
    for at, item in enumerate(items):
        owners.setdefault(crowd[at % half], {})[item] = at
        waits.setdefault(crowd[half + at * 7 % half], []).append(item)
    plan = Plan(round=10**6, era=1, resource_version=1, owners=owners, waits={name: tuple(sorted(some)) for name, some in waits.items()})
    stored = encode_record(plan)
    assert stored.startswith(PACKED)
    assert len(stored) < largest_commit(KEYS, items, items) - 2 * MAX_NAMES


@pytest.mark.parametrize("seed", range(12))
def test_no_promise_is_broken_with_packed_records(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_records, "MAX_PLAIN", 0)
    run_group(seed)
