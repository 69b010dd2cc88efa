"""The specifications that are checked, by name, and how each is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from spec import (
    bucket_journals,
    capture_tasks,
    compatibility_levels,
    group_claims,
    group_rounds,
    partition_fences,
    partition_removal,
    rebalance_keys,
)
from spec.checker import Checker, Result

Steps = Callable[[Any], Iterable[tuple[str, Callable[[], Any]]]]


class Spec(NamedTuple):
    """`rules`: the type of its bounds and rules. `model`: the steps under such rules, and the first state. `ablations`: the rules without
    one, by what is missing, each in bounds within which the checker must find a broken promise."""

    title: str
    rules: type[Any]
    model: Callable[[Any], tuple[Steps, Any]]
    ablations: Mapping[str, Any]

    @property
    def bounds(self) -> dict[str, int]:
        """The bounds by name, as they are by default."""
        return {each.name: each.default for each in fields(self.rules) if type(each.default) is int}

    def check(self, rules: Any, tell: Callable[[int, int], None] = lambda states, depth: None) -> Result:
        """Visit all states under these rules. `tell` is called at each depth with the number of states so far."""
        steps, first = self.model(rules)
        return Checker(steps).check(first, tell)


def _fences(rules: partition_fences.Rules) -> tuple[Steps, Any]:
    return partition_fences.FencedPartition(rules).steps, partition_fences.first_state(rules.owners)


def _rounds(rules: group_rounds.Rules) -> tuple[Steps, Any]:
    model = group_rounds.RoundsModel(rules)
    return model.steps, model.first()


def _claims(rules: group_claims.Rules) -> tuple[Steps, Any]:
    model = group_claims.ClaimsModel(rules)
    return model.steps, model.first()


def _keys(rules: rebalance_keys.Rules) -> tuple[Steps, Any]:
    model = rebalance_keys.RebalanceKeys(rules)
    return model.steps, model.first()


def _removal(rules: partition_removal.Rules) -> tuple[Steps, Any]:
    model = partition_removal.PartitionRemoval(rules)
    return model.steps, model.first()


def _tasks(rules: capture_tasks.Rules) -> tuple[Steps, Any]:
    model = capture_tasks.CaptureTasks(rules)
    return model.steps, model.first()


def _bucket(rules: bucket_journals.Rules) -> tuple[Steps, Any]:
    return bucket_journals.Journals(rules).steps, bucket_journals.first_state(rules)


def _levels(rules: compatibility_levels.Rules) -> tuple[Steps, Any]:
    model = compatibility_levels.CompatibilityLevels(rules)
    return model.steps, model.first()


SPECS = {
    "fences": Spec("a partition under fences", partition_fences.Rules, _fences, partition_fences.ABLATIONS),
    "rounds": Spec("the rounds of a group", group_rounds.Rules, _rounds, group_rounds.ABLATIONS),
    "claims": Spec("the claims of a group", group_claims.Rules, _claims, group_claims.ABLATIONS),
    "keys": Spec("a rebalance that moves keys in order", rebalance_keys.Rules, _keys, rebalance_keys.ABLATIONS),
    "removal": Spec("a rebalance that removes a partition", partition_removal.Rules, _removal, partition_removal.ABLATIONS),
    "tasks": Spec("the tasks of a capture", capture_tasks.Rules, _tasks, capture_tasks.ABLATIONS),
    "bucket": Spec("a partition in a bucket", bucket_journals.Rules, _bucket, bucket_journals.ABLATIONS),
    "level": Spec("the compatibility level", compatibility_levels.Rules, _levels, compatibility_levels.ABLATIONS),
}


class Task(NamedTuple):
    """One check: of the specification with these bounds (empty: its own), or without a rule. By name, so that another process can do it."""

    spec: str
    ablation: str | None = None
    bounds: tuple[tuple[str, int], ...] = ()


def run(task: Task) -> Result:
    """Check what the task names."""
    spec = SPECS[task.spec]
    rules = spec.rules(**dict(task.bounds)) if task.ablation is None else spec.ablations[task.ablation]
    return spec.check(rules, lambda states, depth: print(f"… {task.spec}, depth {depth}: {states:,} states", end="\r", file=sys.stderr))
