"""Encoders of the operator's calls: keys, audit trail, configuration, backends, instances, captures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from sluiceway.client import answers
from sluiceway.client.protocol import Call, Duration, call, duration_text, given, listed, time_text
from sluiceway.contract.capture_answers import TaskGroup, TaskList


def create_key(
    name: str,
    scopes: Iterable[str],
    expires_after: Duration | None,
    requests_per_second: int | None,
    bytes_per_second: int | None,
) -> Call[answers.CreatedKey]:
    fields = given(
        name=name,
        scopes=listed(scopes, "scopes"),
        expires_after=duration_text(expires_after),
        requests_per_second=requests_per_second,
        bytes_per_second=bytes_per_second,
    )
    # A repeat after a success would create a second key, and the first one's secret would be lost.
    return call("/v1/keys.create", answers.CreatedKey, fields, repeatable=False)


def list_keys(pivot: str | None, limit: int | None) -> Call[answers.KeyPage]:
    return call("/v1/keys.list", answers.KeyPage, given(pivot=pivot, limit=limit))


def revoke_key(key_id: str) -> Call[dict[str, object]]:
    return call("/v1/keys.revoke", dict[str, object], {"key_id": key_id})


def own_key() -> Call[answers.OwnKey]:
    return call("/v1/keys.self", answers.OwnKey, {})


def list_audit(
    pivot: str | None,
    limit: int | None,
    queue_name: str | None,
    action: str | None,
    actor: str | None,
    since: datetime | None,
    until: datetime | None,
) -> Call[answers.AuditPage]:
    times = given(since=time_text(since, "since"), until=time_text(until, "until"))
    fields = given(pivot=pivot, limit=limit, queue_name=queue_name, action=action, actor=actor) | times
    return call("/v1/audit.list", answers.AuditPage, fields)


def reload_config() -> Call[answers.Reloaded]:
    return call("/v1/config.reload", answers.Reloaded, {})


def show_config() -> Call[dict[str, object]]:
    return call("/v1/config.show", dict[str, object], {})


def list_instances() -> Call[answers.InstanceList]:
    return call("/v1/instances.list", answers.InstanceList, {})


def finalize_upgrade() -> Call[answers.InstanceList]:
    return call("/v1/upgrades.finalize", answers.InstanceList, {})


def update_instances(times: Mapping[str, Duration | None], strategy: str | None, load_moves: int | None) -> Call[answers.InstanceList]:
    texts = {name: duration_text(each) for name, each in times.items() if each is not None}
    return call("/v1/instances.update", answers.InstanceList, texts | given(strategy=strategy, load_moves=load_moves))


def list_rounds(limit: int | None) -> Call[answers.RoundList]:
    return call("/v1/rounds.list", answers.RoundList, given(limit=limit))


def list_backends() -> Call[answers.BackendPage]:
    return call("/v1/backends.list", answers.BackendPage, {})


def list_tasks() -> Call[TaskList]:
    return call("/v1/tasks.list", TaskList, {})


def get_tasks(name: str) -> Call[TaskGroup]:
    return call("/v1/tasks.get", TaskGroup, {"name": name})
