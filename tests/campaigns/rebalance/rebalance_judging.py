"""Rebalances asked for, followed to their end and judged: by what they say, by what the queue then has, and by the audit trail."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import httpx

from tests.campaigns.kit.report import Report
from tests.campaigns.rebalance.holding import ENDED
from tests.campaigns.rebalance.mixed_fleet import MixedFleet
from tests.server.server_process import wait_until

ENDED_WITHIN = 180.0
"""Seconds that a rebalance under load may take. What takes longer stands still."""
STEPS = ("create", "flip", "shut", "keys", "drain", "finish")
MANY = 1_000


class Refused(NamedTuple):
    """A call that surely did nothing, and would not if it was repeated."""

    code: str
    detail: str


def ask(fleet: MixedFleet, name: str, patience: float = 60.0, **fields: Any) -> Any:
    """The answer of one instance that runs, or Refused. Repeated at all of them while none can say; so only for what may be repeated."""
    found: list[Any] = []
    instances = list(fleet.instances)
    random.shuffle(instances)

    def answered() -> bool:
        for instance in instances:
            if not instance.runs or instance.is_frozen:
                continue
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(f"{instance.url}/v1/{name}", json=fields, timeout=patience)
                body = answer.json()
                if answer.status_code == 200:
                    found.append(body)
                elif not body["retryable"]:
                    found.append(Refused(body["code"], body.get("detail", "")))
                if found:
                    return True
        return False

    wait_until(answered, f"an answer to {name}", patience)
    return found[0]


def place(fleet: MixedFleet, queue: str) -> dict[int, str]:
    """The backend of each partition."""
    return {each["partition"]: each["backend"] for each in ask(fleet, "queues.info", queue_name=queue)["partitions"]}


def how_many(fleet: MixedFleet, queue: str) -> Counter[str]:
    """How many partitions each backend has."""
    return Counter(place(fleet, queue).values())


class Moves:
    """Of one fleet. What is wrong is in the report."""

    def __init__(self, report: Report, fleet: MixedFleet) -> None:
        self._report = report
        self._fleet = fleet
        self.ended: list[dict[str, Any]] = []

    def ask_for(self, queue: str, **fields: Any) -> str:
        """Begin one; its id. One that an earlier try has begun will do."""
        begun = ask(self._fleet, "queue.rebalance", queue_name=queue, **fields)
        if isinstance(begun, Refused) and begun.code == "rebalance_open":
            (begun,) = ask(self._fleet, "rebalances.list", queue_name=queue, open=True)["items"]
        assert not isinstance(begun, Refused), f"{queue} cannot be rebalanced: {begun}"
        return str(begun["id"])

    def get(self, rebalance: str) -> dict[str, Any]:
        found = ask(self._fleet, "rebalances.get", id=rebalance)
        assert not isinstance(found, Refused), found
        return dict(found)

    def has_ended(self, rebalance: str) -> bool:
        return self.get(rebalance)["state"] in ENDED

    def follow(self, rebalance: str, state: str = "done", within: float = ENDED_WITHIN, faults: Any = None) -> dict[str, Any]:
        """Wait for its end, which must be that one, and judge it. `faults`: a tally; once it has some, nothing is waited for."""
        deadline = time.monotonic() + within
        while (found := self.get(rebalance))["state"] not in ENDED:
            assert faults is None or not faults.faults, "something else was wrong already"
            if time.monotonic() > deadline:
                raise AssertionError(f"{rebalance} has not ended within {within:.0f} s: {brief(found)}")
            time.sleep(0.05)
        self.ended.append(found)
        if found["state"] != state:
            self._report.fail(f"{rebalance} ended as {found['state']}, not as {state}: {brief(found)}")
        for line in (*self._wrong_place(found), *wrong_steps(found)):
            self._report.fail(f"{found['queue_name']} {rebalance}: {line}")
        return found

    def do(self, queue: str, faults: Any = None, **fields: Any) -> dict[str, Any]:
        """From its beginning to its end."""
        return self.follow(self.ask_for(queue, **fields), faults=faults)

    def do_if_needed(self, queue: str, faults: Any = None, **fields: Any) -> dict[str, Any] | None:
        """The same; None if there is nothing to do."""
        if isinstance(planned := ask(self._fleet, "rebalances.plan", queue_name=queue, **without(fields, "drain", "rate")), Refused):
            raise AssertionError(f"{queue} cannot be planned: {planned}")
        plan = planned["plan"]
        if not (plan["creates"] or plan["drains"] or plan["reopens"]):
            return None
        return self.do(queue, faults, **fields)

    def do_all(self, faults: Any = None, **fields: Any) -> list[dict[str, Any]]:
        """All queues, as one batch. Those with nothing to do are left out."""
        batch = ask(self._fleet, "queues.rebalance", all=True, **fields)
        assert not isinstance(batch, Refused), batch
        return [self.follow(each["id"], faults=faults) for each in batch["rebalances"]]

    def _wrong_place(self, found: Mapping[str, Any]) -> list[str]:
        info = ask(self._fleet, "queues.info", queue_name=found["queue_name"])
        wrong = []
        plan = found["plan"]
        if found["state"] == "done":
            wanted = sorted([*plan["keeps"], *(each["partition"] for each in plan["creates"]), *plan["reopens"]])
            there = sorted(each["partition"] for each in info["partitions"])
            if there != wanted:
                wrong.append(f"has partitions {there}, but {wanted} were planned")
        if odd := [f"{each['partition']} {each['state']}" for each in info["partitions"] if each["state"] != "available"]:
            wrong.append(f"has ended, and partitions are not available: {', '.join(odd)}")
        if info["rebalance"] is not None:
            wrong.append(f"has ended, and the queue has {info['rebalance']}")
        return wrong

    def judge_audit(self) -> None:
        """Every step of every rebalance that was followed has its entry, and the states of its partitions have no gap."""
        for found in self.ended:
            entries = self._entries(found["queue_name"], found["id"])
            for line in wrong_entries(found, entries):
                self._report.fail(f"{found['queue_name']} {found['id']}: {line}")
        self._report.say(f"the audit trail of {len(self.ended)} rebalances was read")

    def _entries(self, queue: str, rebalance: str) -> list[dict[str, Any]]:
        """Its entries, oldest first."""
        found: list[dict[str, Any]] = []
        pivot = None
        while True:
            page = ask(self._fleet, "audit.list", queue_name=queue, limit=MANY, pivot=pivot)
            found += [each for each in page["items"] if each["detail"].get("rebalance") == rebalance]
            pivot = page["next"]
            if pivot is None:
                return found[::-1]


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def brief(found: Mapping[str, Any]) -> str:
    """What one wants to know of a rebalance that is not as it should be."""
    keys = ("state", "step", "plan", "items", "moved", "retries", "problem", "progress")
    return ", ".join(f"{key} {found.get(key)}" for key in keys)


def wrong_steps(found: Mapping[str, Any]) -> list[str]:
    """What cannot be in the steps of one that has ended: they are in order, and each removed partition has its own."""
    steps = found["steps"]
    wrong = []
    if found["state"] == "done":
        kinds = [each["step"] for each in steps]
        if kinds != sorted(kinds, key=STEPS.index):
            wrong.append(f"steps out of order: {kinds}")
        if kinds.count("finish") > 1 or (kinds and kinds[-1] != "finish"):
            wrong.append(f"does not end with one finish: {kinds}")
        removed = sorted(each["partition"] for each in steps if each["partition"] is not None)
        if removed != sorted(found["plan"]["drains"]):
            wrong.append(f"removed {removed}, but was to drain {found['plan']['drains']}")
    times = [each["at"] for each in steps]
    if times != sorted(times):
        wrong.append(f"steps go back in time: {times}")
    return wrong


def was_ended_at_once(found: Mapping[str, Any]) -> bool:
    """Whether it was cancelled before anything had used what it made: then the call itself ends it."""
    return found["state"] == "cancelled" and all(each["step"] != "finish" for each in found["steps"])


def wrong_entries(found: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is missing in its audit entries, oldest first, or does not fit."""
    wrong = []
    asked, taken = 0, []
    gone = 0
    states: dict[str, str | None] = {}
    for entry in (those := list(entries)):
        action, detail = entry["action"], entry["detail"]
        if entry is those[-1] and action == "rebalance.finish" and was_ended_at_once(found):
            continue  # It says the same as the one of the call.
        if action == "queue.rebalance":
            asked += 1
        elif action.startswith("rebalance.") and (kind := action.removeprefix("rebalance.")) in STEPS:
            taken.append(kind)
            gone += _count(detail["partitions"]) if kind == "drain" and "partitions" in detail else 0
        if not entry["actor"]:
            wrong.append(f"{action} has no actor")
        # States chain: what one entry says was before is what the last one about the partition has left. Of many only counts are told.
        changes = detail.get("states") or {}
        for partition, change in changes.items():
            if partition.isdigit():
                if states.get(partition, change["from"]) != change["from"]:
                    wrong.append(f"{action}: partition {partition} was {change['from']}, but was left {states[partition]}")
                states[partition] = change["to"]
    if asked != 1:
        wrong.append(f"{asked} entries say who has asked for it")
    # A step may be taken in parts, each with an entry of its own.
    kinds = [kind for kind, _ in groupby(each["step"] for each in found["steps"])]
    if [kind for kind, _ in groupby(taken)] != kinds:
        wrong.append(f"the steps {kinds} have the entries {taken}")
    removed = sum(each["partition"] is not None for each in found["steps"])
    if gone != removed:
        wrong.append(f"{removed} partitions were removed, and the entries say so of {gone}")
    return wrong


def _count(those: list[int] | dict[str, int]) -> int:
    """Of partitions, of which many are only counted."""
    return those["count"] if isinstance(those, dict) else len(those)
