"""Encoders of the calls on whole queues."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from sluiceway.client import answers
from sluiceway.client.protocol import Call, Duration, call, duration_text, given, listed
from sluiceway.contract.consumer_answers import ConsumerPage
from sluiceway.contract.history_answers import QueueHistory
from sluiceway.contract.problem_answers import ProblemList
from sluiceway.contract.queue_settings import Settings as Settings
from sluiceway.contract.queue_settings import Verb as Verb


def _settings(settings: Settings) -> dict[str, object]:
    return {name: duration_text(value) if isinstance(value, timedelta) else value for name, value in settings.items()}


def create_queue(queue_name: str, requested_partitions: int | None, settings: Settings) -> Call[answers.QueueInfo]:
    fields = given(queue_name=queue_name, requested_partitions=requested_partitions) | _settings(settings)
    # A repeat after a success would find the call's own queue and fail with a conflict.
    return call("/v1/queues.create", answers.QueueInfo, fields, repeatable=False)


def update_queue(queue_name: str, version: int | None, settings: Settings) -> Call[answers.QueueInfo]:
    fields = given(queue_name=queue_name, version=version) | _settings(settings)
    # With a version, a repeat after a success would conflict with the call's own change.
    return call("/v1/queues.update", answers.QueueInfo, fields, repeatable=version is None)


def list_queues(pivot: str | None, limit: int | None) -> Call[answers.QueuePage]:
    return call("/v1/queues.list", answers.QueuePage, given(pivot=pivot, limit=limit))


def queue_info(queue_name: str) -> Call[answers.QueueInfo]:
    return call("/v1/queues.info", answers.QueueInfo, {"queue_name": queue_name})


def delete_queue(queue_name: str, force: bool) -> Call[dict[str, object]]:
    # A repeat after a success could delete a newer queue of the same name.
    return call("/v1/queues.delete", dict[str, object], {"queue_name": queue_name, "force": force}, repeatable=False)


def pause(queue_name: str, verbs: Iterable[Verb] | None, paused: bool) -> Call[answers.QueueInfo]:
    fields = given(queue_name=queue_name, verbs=None if verbs is None else listed(verbs, "verbs"))
    return call("/v1/queue.pause" if paused else "/v1/queue.resume", answers.QueueInfo, fields)


def clear(queue_name: str, ready: bool, scheduled: bool, request_timeout: Duration | None) -> Call[answers.Cleared]:
    # Repeatable: a repeat may drop items that the first attempt left, but they arrived while the call was still running.
    fields = {"queue_name": queue_name, "ready": ready, "scheduled": scheduled}
    return call("/v1/queue.clear", answers.Cleared, fields, request_timeout=request_timeout)


def redrive(
    queue_name: str,
    target: str | None,
    limit: int | None,
    reason: str | None,
    source: str | None,
    dry_run: bool,
    request_timeout: Duration | None,
) -> Call[answers.Redriven]:
    fields = given(queue_name=queue_name, target=target, limit=limit, reason=reason, source=source, dry_run=dry_run or None)
    # A repeat after a success would redrive up to `limit` other items.
    return call("/v1/queue.redrive", answers.Redriven, fields, repeatable=dry_run, request_timeout=request_timeout)


def stats(queue_name: str) -> Call[answers.QueueStats]:
    return call("/v1/queue.stats", answers.QueueStats, {"queue_name": queue_name})


def keys(queue_name: str, limit: int | None) -> Call[answers.QueueKeys]:
    return call("/v1/queue.keys", answers.QueueKeys, given(queue_name=queue_name, limit=limit))


def history(queue_name: str, minutes: int | None) -> Call[QueueHistory]:
    return call("/v1/queue.history", QueueHistory, given(queue_name=queue_name, minutes=minutes))


def list_problems(queue_name: str | None) -> Call[ProblemList]:
    return call("/v1/problems.list", ProblemList, given(queue_name=queue_name))


def list_consumers(queue_name: str | None, pivot: str | None, limit: int | None) -> Call[ConsumerPage]:
    return call("/v1/consumers.list", ConsumerPage, given(queue_name=queue_name, pivot=pivot, limit=limit))
