"""Produces with a key go where any others go, and stay repeatable."""

from __future__ import annotations

import zlib
from collections import Counter

import pytest

from sluiceway.core.partition.idempotency_keys import KeyMemory, KeyRecord, KeyResult, pack
from sluiceway.core.partition.key_slots import slot
from sluiceway.core.partition.partition import Partition
from sluiceway.core.queue.executor_health import DEGRADED
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import BURST_KEY, GENERATED_KEY
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Produced, ProduceKey
from tests.core.queue_rig import Rig, produce

REFUSED, UNKNOWN = Outcome.REFUSED, Outcome.UNKNOWN
KEY = ProduceKey("key-0")
"""Its home is partition 0 of two, and of four."""


def keys_of(home: int, partitions: int, count: int, prefix: str = "k") -> list[ProduceKey]:
    found = (ProduceKey(f"{prefix}{number}") for number in range(10_000))
    return [key for key in found if slot(key, partitions) == home][:count]


def filled(*waiting: int) -> Rig:
    rig = Rig(len(waiting))
    # So that a hundred items make a partition fuller than others.
    rig.queue.tolerance = 16
    for number, count in enumerate(waiting):
        if count:
            rig.fill(number, count)
    return rig


def test_the_keys_of_a_burst_have_one_home() -> None:
    for partitions in (2, 3, 256):
        homes = {slot(ProduceKey(f"{BURST_KEY}5f/{call}"), partitions) for call in range(20)}
        assert len(homes) == 1
    assert len({slot(ProduceKey(f"{BURST_KEY}{burst}/0"), 256) for burst in range(40)}) > 20


def test_other_keys_keep_their_homes() -> None:
    """They are remembered there, also after an upgrade."""
    names = ("k", f"{GENERATED_KEY}5f", f"{GENERATED_KEY}5f/1", "+/1")
    assert [slot(ProduceKey(name), 256) for name in names] == [zlib.crc32(name.encode()) % 256 for name in names]
    assert slot(ProduceKey("k", "group/1"), 256) == zlib.crc32(b"group/1") % 256


HOME_OF_2 = keys_of(0, 2, 3)
HOME_OF_3 = keys_of(0, 3, 3)


def test_keyed_produces_fill_the_emptiest_partitions() -> None:
    rig = filled(1_000, 1_000, 0, 0)
    landed: Counter[int] = Counter()
    for number in range(200):
        ticket = rig.ask(produce(key=ProduceKey(f"k{number}")))
        rig.end_all()
        landed[rig.produced(ticket).partition] += 1
    assert landed[0] == landed[1] == 0
    assert abs(landed[2] - landed[3]) <= 20


def test_a_balanced_queue_takes_a_keyed_produce_in_one_commit() -> None:
    rig = filled(1_000, 1_010, 1_100, 990)
    before = rig.commit_count
    for number in range(50):
        rig.ask(produce(key=ProduceKey(f"k{number}")))
        rig.end_all()
    assert rig.commit_count == before + 50


def test_the_intents_of_a_turn_share_a_commit_of_their_home() -> None:
    rig = filled(100, 0)
    tickets = [rig.submit(produce(key=key)) for key in keys_of(0, 2, 10)]
    before = rig.commit_count
    rig.cycle()
    rig.end(0)
    rig.end(1)
    assert rig.commit_count == before + 2
    assert {rig.produced(ticket).partition for ticket in tickets} == {1}


def test_what_is_intended_for_a_partition_counts_there() -> None:
    rig = filled(100, 0, 0)
    tickets = [rig.submit(produce(20, key=key)) for key in keys_of(0, 3, 4)]
    rig.cycle()
    rig.end_all()
    assert Counter(rig.produced(ticket).partition for ticket in tickets) == {1: 2, 2: 2}
    assert [executor.coming for executor in rig.queue.executors.values()] == [0, 0, 0]


@pytest.mark.parametrize("again", ["at once", "after the home was opened anew", "after both were opened anew"])
def test_a_repetition_is_answered_by_the_target(again: str) -> None:
    rig = filled(100, 0)
    first = rig.ask(produce(3, key=HOME_OF_2[0]))
    rig.end_all()
    assert rig.produced(first) == Produced(1, 0, 3, False)
    if again != "at once":
        for number in (0, 1) if "both" in again else (0,):
            rig.queue.retry_now([number], rig.now, anew=True)
            rig.cycle()
            rig.open(number)
    second = rig.ask(produce(3, key=HOME_OF_2[0]))
    rig.wait(0)
    rig.end_all()
    assert rig.produced(second) == Produced(1, 0, 3, True)
    assert rig.durable(1)[0] == 3


def test_the_target_is_written_after_the_intent_is_durable() -> None:
    rig = filled(100, 0)
    ticket = rig.ask(produce(key=HOME_OF_2[0]))
    assert list(rig.commits) == [0]
    rig.end(0, UNKNOWN, landed=False)
    assert not rig.commits
    rig.open(0)
    rig.end(0)
    assert list(rig.commits) == [1]
    rig.end(1)
    assert rig.produced(ticket).partition == 1


def test_a_target_that_refuses_is_replaced() -> None:
    rig = filled(100, 0, 5)
    ticket = rig.ask(produce(key=HOME_OF_3[0]))
    rig.end(0)
    rig.end(1, REFUSED)
    assert list(rig.commits) == [0], "another intent comes first"
    rig.end(0)
    rig.end(2)
    assert rig.produced(ticket).partition == 2
    rig.open(1)
    again = rig.ask(produce(key=HOME_OF_3[0]))
    rig.end_all()
    assert rig.produced(again) == Produced(2, 5, 1, True)
    assert [rig.durable(number)[0] for number in range(3)] == [100, 0, 6]


@pytest.mark.parametrize("landed", [True, False])
def test_an_unknown_target_is_asked_before_anything_is_written_elsewhere(landed: bool) -> None:
    rig = filled(100, 0, 5)
    first = rig.ask(produce(key=HOME_OF_3[0], timeout=1_000))
    rig.end(0)
    rig.end(1, UNKNOWN, landed=landed)
    rig.wait(1_000)
    assert rig.code(first) == "outcome_unknown"
    again = rig.ask(produce(key=HOME_OF_3[0]))
    assert not rig.commits
    rig.open(1)
    rig.end_all()
    assert rig.produced(again).partition == 1
    assert [rig.durable(number)[0] for number in range(3)] == [100, 1, 5]


def test_a_repetition_waits_while_the_first_is_at_its_target() -> None:
    rig = filled(100, 0, 5)
    first = rig.ask(produce(key=HOME_OF_3[0]))
    rig.end(0)
    again = rig.ask(produce(key=HOME_OF_3[0]))
    assert list(rig.commits) == [1]
    rig.end(1)
    rig.end_all()
    assert (rig.produced(first).deduplicated, rig.produced(again).deduplicated) == (False, True)
    assert rig.durable(1)[0] == 1


def test_a_target_that_hangs_before_it_has_begun_is_replaced() -> None:
    rig = filled(100, 0, 50)
    key, other = HOME_OF_3[:2]
    flying = rig.ask(produce(key=other))
    rig.end(0)
    assert list(rig.commits) == [1]
    ticket = rig.ask(produce(key=key))
    rig.end(0)
    rig.wait(DEGRADED[0] + 1)
    rig.end(0)
    rig.end(2)
    assert rig.produced(ticket).partition == 2
    assert flying not in rig.answers
    rig.end_all()
    assert [rig.durable(number)[0] for number in range(3)] == [100, 1, 51]


def test_an_intent_whose_target_is_shut_goes_elsewhere_after_it_has_refused() -> None:
    rig = filled(100, 0, 50)
    first = rig.ask(produce(key=HOME_OF_3[0], timeout=1_000))
    rig.end(0)
    rig.end(1, UNKNOWN, landed=False)
    rig.wait(1_000)
    assert rig.code(first) == "outcome_unknown"
    rig.queue.retry_now([0], rig.now, anew=True)
    rig.cycle()
    rig.open(0)
    rig.open(1)
    rig.queue.executors[1].partition.log.header.shut = 1
    again = rig.ask(produce(key=HOME_OF_3[0]))
    rig.wait(0)
    assert list(rig.commits) == [1], "that it never takes them is durable first"
    rig.end(1)
    rig.end_all()
    assert rig.produced(again).partition == 2
    assert [rig.durable(number)[0] for number in range(3)] == [100, 0, 51]


def test_an_intent_that_was_never_followed_binds_no_body() -> None:
    rig = filled(100, 0, 50)
    first = rig.ask(produce(key=HOME_OF_3[0], timeout=100))
    rig.wait(100)
    assert rig.code(first) == "unavailable", "only an intent was being written"
    rig.end(0)
    other = rig.ask(produce(2, key=HOME_OF_3[0], text="other"))
    rig.end_all()
    assert rig.produced(other).items == 2
    conflict = rig.ask(produce(1, key=HOME_OF_3[0]))
    rig.end_all()
    assert rig.code(conflict) == "key_conflict"


def test_a_generated_key_is_refused_at_once_while_its_home_is_away() -> None:
    rig = Rig(2)
    rig.ask(produce(key=KEY))
    rig.end(0, UNKNOWN, landed=True)
    (generated,) = keys_of(0, 2, 1, GENERATED_KEY)
    quick, patient = rig.ask(produce(key=generated)), rig.ask(produce(key=HOME_OF_2[1]))
    assert rig.code(quick) == "unavailable"
    assert patient not in rig.answers, "what a client has chosen, it cannot replace"
    rig.open(0)
    rig.end_all()
    assert rig.produced(patient).partition == 0


def test_an_intent_in_a_home_that_hangs_is_given_up_if_its_key_can_be_replaced() -> None:
    rig = filled(100, 0)
    (generated,) = keys_of(0, 2, 1, GENERATED_KEY)
    quick, patient = rig.submit(produce(key=generated)), rig.submit(produce(key=HOME_OF_2[1]))
    rig.cycle()
    rig.wait(DEGRADED[0] + 1)
    assert rig.code(quick) == "unavailable"
    assert patient not in rig.answers
    rig.end(0)
    rig.end_all()
    assert rig.produced(patient).partition == 1
    assert rig.durable(1)[0] == 1, "nothing follows an intent that was given up"


def test_a_group_has_its_sequence_judged_at_its_home() -> None:
    rig = filled(100, 0)
    group = next(name for name in (f"g{n}" for n in range(100)) if slot(ProduceKey("", name), 2) == 0)
    answers = []
    for sequence, key in ((1, "a"), (1, "b"), (1, "a"), (2, "a"), (1, "b")):
        answers.append(rig.ask(produce(key=ProduceKey(f"{sequence}{key}", group, sequence))))
        rig.end_all()
    assert [rig.produced(ticket)[:4] for ticket in answers[:4]] == [(1, 0, 1, False), (1, 1, 1, False), (1, 0, 1, True), (1, 2, 1, False)]
    assert rig.code(answers[4]) == "stale_sequence"


def test_an_answer_that_the_home_knows_is_written_before_its_target_forgets_it() -> None:
    home, key = KeyMemory(), ProduceKey("k")
    answer = KeyResult(b"digest", 12, 2, 1)
    home.settle(key, home.intend(key, 2, 1, 1_000), answer)
    home.touched.clear()
    (name,) = home.records
    home.note_answers({name: pack(KeyRecord({"k": answer}, 0, home.records[name].until))})
    assert name in home.touched
    loaded, written = KeyMemory(), home.record(name)
    assert written is not None
    loaded.load(name, written)
    assert loaded.find(key) == answer


def test_a_partition_that_gave_a_key_away_does_not_note_what_its_target_answered() -> None:
    home, key = Partition(), ProduceKey("k")
    home.keys.intend(key, 2, 1, 1_000)
    (name,) = home.keys.records
    told = {name: pack(KeyRecord({"k": KeyResult(b"digest", 12, 2, 1)}, 0, home.keys.records[name].until))}
    home.admission.give_keys([slot(key, 256)], 256, 1, 0)
    with pytest.raises(SluicewayError) as refused:
        home.admission.note_answers(told)
    assert refused.value.code == "version_conflict"


def test_the_target_remembers_longer_than_the_home() -> None:
    rig = filled(100, 0)
    key = HOME_OF_2[0]._replace(window=1_000)
    ticket = rig.ask(produce(key=key))
    rig.end_all()
    assert rig.produced(ticket).partition == 1
    home, target = (rig.queue.executors[number].partition.keys for number in (0, 1))
    (record,), (placed,) = home.records.values(), target.records.values()
    assert placed.until > record.until
