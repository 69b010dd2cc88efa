"""The phases of a takeover are found among all requests to the bucket."""

from __future__ import annotations

from tests.campaigns.cluster.takeover_phases import Phase, openings
from tests.servers.faulty_bucket import Request

FOLDER = "b/partitions/k7f3q2ma-1"
DEAD, OWN = "b/journals/dead/log/", "b/journals/own/log/"


def request(began: float, method: str, name: str, by: str = "i1.1", status: int = 200) -> Request:
    return Request(began, began + 1, by, method, name, status)


def test_an_opening_is_told_phase_by_phase() -> None:
    requests = [
        request(0, "GET", f"{FOLDER}/head"),
        request(0, "GET", "b/partitions/k7f3q2ma-2/head"),
        request(0, "PUT", f"{DEAD}1", "i2.1"),
        request(1, "LIST", DEAD),
        request(1, "GET", f"{FOLDER}/life/checkpoint/1"),
        request(1, "PUT", f"{OWN}1"),
        request(2, "PUT", f"{DEAD}3"),
        request(2, "GET", f"{DEAD}1"),
        request(2.5, "GET", f"{DEAD}2"),
        # Of two that have read the head, one finds another.
        request(4, "PUT", f"{FOLDER}/head", "i2.1", 412),
        request(4, "PUT", f"{FOLDER}/head"),
        request(5, "PUT", f"{OWN}2"),
        request(6, "PUT", f"{OWN}3"),
    ]
    assert list(openings(requests, FOLDER, {f"{OWN}3"})) == [
        Phase(0, 1, "i1.1: head read"),
        Phase(1, 2, "listed"),
        Phase(2, 3, "journal ended"),
        Phase(2, 3.5, "2 × entries read"),
        Phase(1, 2, "checkpoint read"),
        Phase(4, 5, "i1.1: head written"),
        Phase(6, 7, "i1.1: first cycle written"),
    ]
    assert Phase(1, 2.5, "listed").told(0.5) == "listed +0.50…+2.00"
