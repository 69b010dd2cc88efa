"""Clients that mean harm: the server lives, stays below its memory ceiling, and serves everybody else meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile import attacks_connections as connections
from tests.hostile import attacks_payloads as payloads
from tests.hostile import attacks_peers as peers
from tests.hostile import attacks_requests as requests
from tests.hostile.arena import MIB, Arena, Attack

FAST: list[Attack] = [
    connections.cut_off,
    connections.half_closed,
    connections.other_protocols,
    connections.pipelined,
    payloads.aliased_arrow,
    payloads.compressed_arrow,
    payloads.deep_json,
    payloads.huge_json_numbers,
    payloads.odd_json,
    payloads.shared_arrow,
    payloads.wrong_types,
    peers.bombs_with_the_secret,
    peers.far_numbers_with_the_secret,
    peers.strangers_that_ask,
    requests.bombs_in_the_query,
    requests.huge_header,
    requests.injected_headers,
    requests.many_headers,
    requests.odd_paths_and_methods,
    requests.smuggling,
    requests.wrong_lengths,
]
SLOW: list[Attack] = [
    connections.churn,
    connections.idle_connections,
    connections.long_polls,
    connections.readers_of_events_that_do_not_read,
    connections.silent_connections,
    connections.slow_bodies,
    connections.slow_headers,
    connections.slow_readers_of_large_answers,
    connections.slow_readers_of_small_answers,
    payloads.arrow_bombs,
    payloads.lying_arrow,
    payloads.swelling_json,
    payloads.swelling_protobuf,
    peers.floods_of_wrong_secrets,
    peers.lying_messages_with_the_secret,
    peers.waiting_with_the_secret,
    requests.bodies_that_are_held,
    requests.chunked_bombs,
    requests.floods_of_keys,
    requests.floods_of_strangers,
    requests.huge_bodies,
]
CASES = [
    *(pytest.param(attack, id=attack.__name__) for attack in FAST),
    *(pytest.param(attack, id=attack.__name__, marks=pytest.mark.slow) for attack in SLOW),
]


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with Arena(tmp_path_factory.mktemp("arena")) as arena:
        yield arena


@pytest.mark.parametrize("attack", CASES)
def test_an_attack_hurts_nobody_else(arena: Arena, attack: Attack) -> None:
    with arena.watched():
        attack(arena)
    print(f"{attack.__name__}: at most {arena.peak() // MIB} MiB")
