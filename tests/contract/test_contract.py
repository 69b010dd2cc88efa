"""What the contract says once is what its parts have."""

from __future__ import annotations

from typing import get_type_hints

import msgspec
import pytest

from sluiceway.contract.fields import Answer
from sluiceway.contract.queue_settings import QUEUE_SETTINGS, QueueInfo, QueueSettings, Settings
from sluiceway.contract.queue_stats import COUNTERS, LEVELS, WAITING, LogicalQueueStats, PartitionStats
from sluiceway.core.partition.records import Header
from sluiceway.wire.json_queues import CreateCall, UpdateCall


def names(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def test_every_setting_of_a_queue_is_in_the_calls_the_answer_and_the_keyword_arguments() -> None:
    settings = set(names(QueueSettings))
    assert settings == set(QUEUE_SETTINGS) == set(get_type_hints(Settings))
    for kind in (CreateCall, UpdateCall, QueueInfo):
        assert settings <= set(names(kind)), kind


@pytest.mark.parametrize("name", QUEUE_SETTINGS)
def test_a_setting_can_be_shown_and_its_default_is_shown_as_a_new_queue_has_it(name: str) -> None:
    setting = QUEUE_SETTINGS[name]
    assert setting.label
    assert setting.about.endswith(".")
    assert setting.default_text
    assert QueueSettings().settings_text()[name] == setting.text(setting.default)
    assert setting.read(None) == setting.default
    (shown,) = [field for field in msgspec.structs.fields(QueueInfo) if field.name == name]
    if shown.default is not msgspec.NODEFAULT:
        assert shown.default == setting.text(setting.default), "a client of an older server would be shown another default"


def test_every_counter_of_a_partition_is_in_its_header() -> None:
    assert set(COUNTERS) < set(names(Header))
    assert {*COUNTERS, *LEVELS} < set(names(PartitionStats))
    assert set(WAITING) < set(names(LogicalQueueStats))


def test_a_client_ignores_what_it_does_not_know() -> None:
    class Newer(Answer, frozen=True, kw_only=True):
        partition: int
        invented: str

    body = msgspec.json.encode(Newer(partition=3, invented="later"))
    assert msgspec.json.decode(body, type=PartitionStats).partition == 3
