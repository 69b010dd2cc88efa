from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_KEY_RATE, MAX_KEY_SCOPES, MAX_KEY_TIMEOUT
from sluiceway.model.access import (
    ACTIONS,
    ANYBODY,
    Action,
    ApiKey,
    Caller,
    KeySpec,
    Scope,
    check_admin_key,
    decode_key,
    encode_key,
    parse_scope,
)

NOW = 1_700_000_000_000
NAMES = st.text(string.ascii_letters + string.digits + "_.-", min_size=1, max_size=20).filter(lambda name: name[0] not in ".-")
ON_QUEUES = st.sampled_from([action for action in ACTIONS if action != "admin"])


@given(ON_QUEUES, st.text(string.ascii_letters + "_.-*", min_size=1, max_size=128))
def test_a_scope_has_one_text(action: Action, pattern: str) -> None:
    assert parse_scope(f"{action}:{pattern}", "scopes") == Scope(action, pattern)
    assert str(Scope(action, pattern)) == f"{action}:{pattern}"


@pytest.mark.parametrize(
    "text",
    ["", "produce", "produce:", ":orders", "lease:*", "admin:*", "admin:", "ADMIN", "produce:a b", "produce:a?", "produce:[ab]"],
)
def test_what_is_no_scope(text: str) -> None:
    refused(text)


@pytest.mark.parametrize("text", ["produce:é", "produce:" + "a" * 129, " produce:a", "produce:a\n", None, 7])
def test_what_is_no_scope_either(text: object) -> None:
    refused(text)


def refused(text: object) -> None:
    with pytest.raises(SluicewayError, match=r"^scopes\[0\]: ") as caught:
        parse_scope(text, "scopes[0]")
    assert caught.value.code == "invalid_request"


@given(ON_QUEUES, NAMES)
def test_a_name_is_a_pattern_of_itself_alone(action: Action, name: str) -> None:
    scope = parse_scope(f"{action}:{name}", "scopes")
    assert scope.covers(action, name)
    assert not scope.covers(action, name + "x")
    assert not scope.covers(action, "x" + name)


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("*", ["a", "orders-1", "a.b"], []),
        ("orders-*", ["orders-", "orders-1", "orders-a-b"], ["orders", "Orders-1", "xorders-1", "order-1"]),
        ("*-dead", ["orders-dead"], ["orders-dead-1"]),
        ("a*b*c", ["abc", "a1b2c"], ["ab", "acb"]),
        # A dot is a dot.
        ("a.b", ["a.b"], ["axb"]),
    ],
)
def test_patterns(pattern: str, inside: list[str], outside: list[str]) -> None:
    scope = parse_scope(f"read:{pattern}", "scopes")
    assert [name for name in inside + outside if scope.covers("read", name)] == inside


@given(ON_QUEUES, ON_QUEUES, NAMES)
def test_one_action_is_no_other(given_action: Action, asked: Action, name: str) -> None:
    caller = Caller("c", (Scope(given_action),))
    assert caller.may(asked, name) == (given_action == asked)


@given(st.lists(st.builds(Scope, ON_QUEUES, st.just("*"))), NAMES)
def test_nothing_but_admin_is_admin(scopes: list[Scope], name: str) -> None:
    assert not Caller("c", tuple(scopes)).may("admin", name)
    assert not Caller("c", tuple(scopes)).may("admin")


@given(ON_QUEUES, NAMES)
def test_admin_is_nothing_but_admin(action: Action, name: str) -> None:
    caller = Caller("c", (Scope("admin"),))
    assert caller.may("admin")
    assert not caller.may(action, name)
    assert not caller.may_all(action)


def test_all_queues() -> None:
    assert Caller("c", (Scope("read", "*"),)).may_all("read")
    assert Caller("c", (Scope("read", "**"),)).may_all("read")
    assert not Caller("c", (Scope("read", "o*"),)).may_all("read")
    assert not Caller("c", (Scope("produce", "*"),)).may_all("read")
    assert ANYBODY.may_all("manage")
    assert ANYBODY.may("admin")


def test_what_is_missing_is_said() -> None:
    with pytest.raises(SluicewayError, match="this key may not produce on queue 'orders'; use one with the scope produce:orders") as caught:
        Caller("c", ()).require("produce", "orders")
    assert caught.value.code == "forbidden"
    with pytest.raises(SluicewayError, match=r"use one with the scope admin$"):
        Caller("c", (Scope("read"),)).require("admin")


def spec(**fields: object) -> KeySpec:
    return KeySpec(**{"name": "etl", "scopes": ["read:*"], **fields})  # type: ignore[arg-type]


def test_scopes_are_kept_once_and_in_order() -> None:
    assert list(spec(scopes=["read:b", "produce:a", "read:b", "admin"]).checked(NOW).scopes) == ["admin", "produce:a", "read:b"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "two words"}, "name"),
        ({"name": "line\nbreak"}, "name"),
        ({"name": "n" * 129}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["read:*"] * (MAX_KEY_SCOPES + 1)}, "scopes"),
        ({"scopes": ["read:*", "write:*"]}, "scopes[1]"),
        ({"expires_at": NOW}, "expires_at"),
        ({"expires_at": NOW + MAX_KEY_TIMEOUT + 1}, "expires_at"),
        ({"requests_per_second": -1}, "requests_per_second"),
        ({"bytes_per_second": MAX_KEY_RATE + 1}, "bytes_per_second"),
    ],
)
def test_a_key_that_cannot_be(fields: dict[str, object], field: str) -> None:
    with pytest.raises(SluicewayError) as caught:
        spec(**fields).checked(NOW)
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)


def test_a_record_is_read_as_it_was_written() -> None:
    key = ApiKey("abcdefgh", "etl", ("read:*",), bytes(range(32)), NOW, NOW + 1, 5, 0)
    assert decode_key(encode_key(key)) == key


def test_a_scope_of_a_newer_version_gives_no_right() -> None:
    key = ApiKey("abcdefgh", "etl", ("read:a", "rebalance:*", "*", "admin:all"), b"", NOW)
    assert key.caller() == Caller("etl/abcdefgh", (Scope("read", "a"),), "abcdefgh")


@pytest.mark.parametrize("text", ["", "x" * 31, "x" * 31 + " ", "x" * 31 + "\n", "é" * 32])
def test_an_admin_key_that_could_be_guessed_or_not_be_sent(text: str) -> None:
    with pytest.raises(SluicewayError, match="at least 32 random ASCII characters") as caught:
        check_admin_key(text, "server.admin_key")
    assert not text or text not in str(caught.value)


def test_an_admin_key() -> None:
    assert check_admin_key("x" * 32, "server.admin_key") == "x" * 32
