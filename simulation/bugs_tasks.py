"""Planted bugs of the task protocol: first its safety rules removed one by one, then mistakes in each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from simulation import tasks_actor, tasks_checks
from simulation.planting import Bug, shelf
from simulation.tasks_actor import Actor
from simulation.tasks_stream import Positions
from sluiceway.core.group import task_fold, task_member
from sluiceway.core.group.task_leader import Division
from sluiceway.core.group.task_member import BrokenOff, Cross, Effect, Ended, Opened, Prepared, Reached, Stop, TaskMember
from sluiceway.core.group.task_state import Entry, Finish, Partition, Release, Seeds, Snapshot, State, Supersede

ABLATIONS: list[Bug] = []
"""Each removes a rule of the protocol, to show that the rule is needed."""
ablation = shelf(ABLATIONS)
BUGS: list[Bug] = []
bug = shelf(BUGS)


# ---- ablations ----------------------------------------------------------------------------------------------------------


@ablation(task_fold, "_created")
def no_parent_gate(original: Any) -> Any:
    """A child is ready as soon as it is known."""
    return lambda partitions, born, waits: replace(original(partitions, born, waits), phase="ready", since=0)


@ablation(Positions, "refuses")
def no_fence(original: Any) -> Any:
    """The position store accepts commits under any grant."""
    return lambda self, token, fence: False


@ablation(Positions, "refuses")
def no_number_of_the_opening(original: Any) -> Any:
    """Opening again under the same grant does not end earlier openings."""
    return lambda self, token, fence: token in self.fences and fence.grant < self.fences[token].grant


@ablation(task_fold, "_stays")
def no_grant_on_cancel(original: Any) -> Any:
    """A cancelled move leaves the grant as it was."""
    return lambda partition, seq: replace(partition, to="")


@ablation(task_member, "may_cross")
def no_wait_at_a_barrier(original: Any) -> Any:
    """A partition goes on past a barrier, whether the sources of its keys have come to theirs or not."""
    return lambda state, token: True


@ablation(task_fold, "_hand_over")
def no_handing_over_before_the_wait(original: Any) -> Any:
    """A partition hands over only what it need not wait for: those that exchange keys wait for each other."""
    return lambda state, record: state if record.takes else original(state, record)


@ablation(TaskMember, "_fare")
def no_wait_after_a_restart(original: Any) -> Any:
    """A reader that finds its barrier reported by an earlier reader goes on."""

    def fare(self: Any, event: Any, now: int) -> Iterator[Effect]:
        yield from original(self, event, now)
        partition = self.state.partitions.get(event.token)
        if isinstance(event, Reached) and partition is not None and partition.barrier >= event.mark:
            yield Cross(event.token, event.grant, event.mark)

    return fare


@ablation(Actor, "_may_report")
def no_commit_before_a_barrier(original: Any) -> Any:
    """A source reports a barrier by what it has in memory, before that is committed."""
    return lambda self, run, around: True


# ---- bugs that Apache Beam's reader of Spanner had ----------------------------------------------------------------------


@ablation(Actor, "_commit")
def no_order_of_commits(original: Any) -> Any:
    """Positions are written without waiting for the one before, and arrive in any order (Beam #36470)."""

    def commit(self: Any, run: Any, around: Any) -> None:
        original(self, run, around)
        run.in_flight = False

    return commit


@ablation(Actor, "_children")
def no_children_from_a_query_that_ended_early(original: Any) -> Any:
    """A query that ends by its own limit, before it has told of the children, is taken for the partition's end (Beam #40232)."""
    return lambda self, run, around: () if around.chance(0.1) else original(self, run, around)


# ---- effective records --------------------------------------------------------------------------------------------------


@bug(task_fold, "_is_next")
def counts_a_rival_of_the_same_term(original: Any) -> Any:
    """A member that calls for the current term leads it."""
    return lambda state, term: term in (state.term, state.term + 1) and term > 0


@bug(task_fold, "_in_term")
def follows_decisions_of_any_term(original: Any) -> Any:
    """A decision counts whatever its term."""
    return lambda state, term: True


@bug(task_fold, "_in_term")
def follows_a_leader_who_has_left(original: Any) -> Any:
    """Decisions of a leader that has left count until the next term."""
    return lambda state, term: bool(term == state.term)


@bug(task_fold, "_holds")
def listens_to_owners_of_before(original: Any) -> Any:
    """Records under an older grant count."""
    return lambda partition, grant: partition is not None and partition.phase == "owned" and grant <= partition.grant


@bug(task_fold, "_owned")
def keeps_the_grant_when_the_owner_changes(original: Any) -> Any:
    """A partition has one grant forever."""
    return lambda partition, owner, seq: original(partition, owner, partition.grant or seq)


@bug(task_fold, "_freed")
def leaves_it_with_those_who_have_gone(original: Any) -> Any:
    """A partition stays with an owner that is not in the term."""
    return lambda partitions, members: partitions


@bug(task_fold, "_given")
def assigns_to_anybody(original: Any) -> Any:
    """A partition may be assigned to a non-member."""

    def given(state: State, seq: int, token: str, to: str) -> Partition | None:
        found: Partition | None = original(replace(state, members=(*state.members, to)), seq, token, to)
        return found

    return given


@bug(task_fold, "_release")
def hands_over_to_those_who_have_gone(original: Any) -> Any:
    """A released partition goes to the target of its move even if that member has gone."""

    def release(state: State, seq: int, record: Release) -> Any:
        to = state.partitions[record.token].to if record.token in state.partitions else ""
        verdict = original(replace(state, members=(*state.members, to)) if to else state, seq, record)
        return replace(verdict, members=state.members) if isinstance(verdict, State) else verdict

    return release


@bug(task_fold, "_leave")
def keeps_those_who_leave(original: Any) -> Any:
    """A member that has left stays in the term."""

    def leave(state: State, record: Any) -> Any:
        verdict = original(state, record)
        return replace(verdict, members=state.members) if isinstance(verdict, State) else verdict

    return leave


# ---- partitions ---------------------------------------------------------------------------------------------------------


@bug(task_fold, "_ticked")
def is_ready_after_its_first_parent(original: Any) -> Any:
    """A child waits for only one of its parents."""

    def ticked(state: State, seq: int, child: Partition, record: Finish, ended_at: int) -> Partition:
        found: Partition = original(state, seq, replace(child, waits=(record.token,)), record, ended_at)
        return found

    return ticked


@bug(task_fold, "_ticked")
def follows_any_hint(original: Any) -> Any:
    """A child goes to the member that the finisher proposes even if that member has gone."""

    def ticked(state: State, seq: int, child: Partition, record: Finish, ended_at: int) -> Partition:
        found: Partition = original(replace(state, members=(*state.members, *record.hints.values())), seq, child, record, ended_at)
        return found

    return ticked


@bug(task_fold, "_bear")
def forgets_children(original: Any) -> Any:
    """The last of a partition's children is forgotten."""
    return lambda partitions, children: original(partitions, tuple(children)[:-1])


@bug(task_fold, "_needed")
def removes_what_children_wait_for(original: Any) -> Any:
    """A finished partition is removed at once."""
    return lambda partitions, waiting, parents: {token: each for token, each in partitions.items() if each.phase != "finished"}


@bug(task_fold, "_needed")
def removes_nothing(original: Any) -> Any:
    """A finished partition is never removed."""
    return lambda partitions, waiting, parents: partitions


@bug(task_fold, "_seeds")
def sows_twice(original: Any) -> Any:
    """Seeds count a second time."""

    def seeds(state: State, record: Seeds) -> Any:
        return original(replace(state, sown=record.after), record)

    return seeds


@bug(task_fold, "_supersede")
def learns_of_children_after_the_end(original: Any) -> Any:
    """A removed partition gets children."""

    def supersede(state: State, record: Supersede) -> Any:
        if record.token in state.partitions:
            return original(state, record)
        parent = {record.token: Partition(record.token, phase="owned")}
        verdict = original(replace(state, partitions=state.partitions | parent), record)
        if isinstance(verdict, str):
            return verdict
        return replace(verdict, partitions={token: each for token, each in verdict.partitions.items() if token != record.token})

    return supersede


@bug(task_fold, "_is_ahead")
def reaches_a_barrier_twice(original: Any) -> Any:
    """A barrier that is reported again counts again."""
    return lambda partition, mark: True


# ---- snapshots and the watermark ------------------------------------------------------------------------------------------


@bug(task_fold, "_snapshot")
def trims_up_to_where_the_snapshot_stands(original: Any) -> Any:
    """A snapshot is taken to cover records between it and its state."""

    def snapshot(state: State, record: Snapshot) -> Any:
        verdict = original(state, record)
        return replace(verdict, kept_from=state.seq) if isinstance(verdict, State) else verdict

    return snapshot


@bug(tasks_actor, "restore")
def restores_from_where_the_snapshot_stands(original: Any) -> Any:
    """A member that starts from a snapshot skips the records between it and its state."""

    def restore(entries: list[Entry]) -> State:
        places = [place for place, (_, record) in enumerate(entries) if isinstance(record, Snapshot)]
        found: State = original(entries[places[-1] :] if places else entries)
        return found

    return restore


@bug(task_fold, "_snapshots")
def takes_a_part_for_a_snapshot(original: Any) -> Any:
    """A member starts from what there is of a snapshot whose other parts are missing."""

    def snapshots(entries: list[Entry]) -> Iterator[State]:
        yield from original(entries)
        yield from (record.state for seq, record in entries if isinstance(record, Snapshot) and record.state.seq < seq)

    return snapshots


@bug(tasks_checks, "watermark")
def counts_only_what_has_begun(original: Any) -> Any:
    """Children without a commit do not hold the watermark back."""

    def watermark(state: State, committed: Mapping[str, int]) -> int | None:
        begun = {token: each for token, each in state.partitions.items() if token in committed}
        found: int | None = original(replace(state, partitions=begun), committed)
        return found

    return watermark


# ---- members ------------------------------------------------------------------------------------------------------------


@bug(TaskMember, "_fare")
def takes_broken_off_for_finished(original: Any) -> Any:
    """A reader that breaks off counts as finished."""

    def fare(self: Any, event: Any, now: int) -> Iterator[Effect]:
        broken = isinstance(event, BrokenOff) and not event.why
        yield from original(self, Ended(event.token, event.grant, (), 0) if broken else event, now)

    return fare


@bug(TaskMember, "_start")
def begins_again_at_the_beginning(original: Any) -> Any:
    """Reading starts at the partition's beginning, whatever is committed."""

    def start(self: Any, opened: Opened) -> str:
        found: str = original(self, opened._replace(position=None))
        return found

    return start


@bug(TaskMember, "_read")
def releases_before_it_has_stopped(original: Any) -> Any:
    """A member reports that it has stopped as soon as it is asked to."""

    def read(self: Any, now: int) -> Iterator[Effect]:
        for effect in original(self, now):
            yield effect
            if isinstance(effect, Stop):
                self._readers[effect.token].phase = "idle"

    return read


@bug(TaskMember, "_give_up")
def opens_before_the_old_reader_has_stopped(original: Any) -> Any:
    """A new grant is opened while a reader under the old one still runs."""

    def give_up(self: Any, token: str, reader: Any) -> Iterator[Effect]:
        yield Stop(token, reader.grant)
        del self._readers[token]

    return give_up


@bug(TaskMember, "_say")
def says_everything_once(original: Any) -> Any:
    """A lost record is not repeated."""

    def say(self: Any, key: Any, now: int) -> bool:
        first = key not in self._said
        return bool(original(self, key, now)) and first

    return say


@bug(TaskMember, "_learn")
def joins_before_it_has_read_the_log(original: Any) -> Any:
    """A member joins once it reaches the position store, without waiting for its own record."""

    def learn(self: Any, event: Any, now: int) -> list[Effect]:
        told: list[Effect] = original(self, event, now)
        if isinstance(event, Prepared) and self.state.seq < event.end:
            told.append(task_member.JoinGroup())
        return told

    return learn


@bug(task_member, "divide")
def divides_for_itself(original: Any) -> Any:
    """The leader assigns everything to itself."""

    def divide(state: State) -> Division:
        found: Division = original(state)
        return Division(dict.fromkeys(found.assign, state.leader), {}, found.cancel)

    return divide


@bug(task_member, "divide")
def moves_without_need(original: Any) -> Any:
    """The plan is not sticky: something moves all the time."""

    def divide(state: State) -> Division:
        found: Division = original(state)
        owned = sorted(token for token, each in state.active().items() if each.owner and not each.to)
        others = [name for name in state.members if owned and name != state.partitions[owned[0]].owner]
        return found._replace(move={owned[0]: others[0]}) if others else found

    return divide
