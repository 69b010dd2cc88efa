"""Where a server listens, and whether it asks callers for a key there."""

from __future__ import annotations

import socket

import pytest

from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.configuration import Address, ServerSettings
from sluiceway.server.listeners import address_of, asks_for_keys, bind, bind_all, is_loopback, url_of

HERE = Address("127.0.0.1", 80)
PUBLIC = Address("192.0.2.1", 80)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_port_0_takes_a_free_one(host: str) -> None:
    with bind(host, 0) as sock:
        assert int(url_of(sock).rpartition(":")[2]) > 0
        assert url_of(sock, tls=True).startswith("https://127.0.0.")


def test_an_address_that_is_none() -> None:
    with pytest.raises(SluicewayError, match="not an address"):
        bind("no such host", 0)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_two_listeners() -> None:
    api, admin = bind_all(ServerSettings(listen="127.0.0.1:0", admin_listen="127.0.0.2:0"))
    with api, admin:
        assert (address_of(api).host, address_of(admin).host) == ("127.0.0.1", "127.0.0.2")


def test_where_the_second_cannot_listen_the_first_does_not(recwarn: pytest.WarningsRecorder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            bind_all(ServerSettings(listen="127.0.0.1:0", admin_listen=f"127.0.0.1:{port}"))
    assert not [each for each in recwarn if issubclass(each.category, ResourceWarning)]
    with pytest.raises(SluicewayError) as caught:
        bind_all(ServerSettings(listen="127.0.0.1:0", admin_listen="no such host:0"))
    assert caught.value.field == "server.admin_listen"


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("fe80::1%eth0", False)]
)
def test_what_other_machines_cannot_reach(host: str, loopback: bool) -> None:
    assert is_loopback(Address(host, 80)) is loopback


@pytest.mark.parametrize(
    ("auth", "addresses", "insecure", "asks"),
    [
        ("auto", [HERE], False, False),
        ("auto", [HERE, HERE], False, False),
        ("auto", [PUBLIC], False, True),
        ("auto", [HERE, PUBLIC], False, True),
        ("auto", [PUBLIC, HERE], False, True),
        ("auto", [PUBLIC], True, False),
        ("keys", [HERE], False, True),
        ("keys", [PUBLIC], True, True),
        ("none", [HERE], False, False),
        ("none", [PUBLIC], True, False),
    ],
)
def test_who_is_asked_for_a_key(auth: str, addresses: list[Address], insecure: bool, asks: bool) -> None:
    assert asks_for_keys(ServerSettings(auth=auth), addresses, insecure) is asks  # type: ignore[arg-type]


@pytest.mark.parametrize("addresses", [[PUBLIC], [HERE, PUBLIC]])
def test_nobody_is_asked_where_others_can_call_only_if_that_is_spelled_out(addresses: list[Address]) -> None:
    with pytest.raises(SluicewayError, match=r"other machines could call 192\.0\.2\.1.*--insecure") as caught:
        asks_for_keys(ServerSettings(auth="none"), addresses, insecure=False)
    assert caught.value.field == "server.auth"
