"""Large answers: sent piece by piece, and cut off when there are too many of them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from sluiceway.server.http import DisconnectedError, Message
from sluiceway.server.response_buffer import BUILT_ALONE, PIECE, AnswerMemory
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually


class Client:
    """Takes pieces as long as it reads."""

    def __init__(self, reads: bool = True) -> None:
        self.reads = asyncio.Event()
        if reads:
            self.reads.set()
        self.pieces: list[Message] = []

    async def send(self, message: Message) -> None:
        self.pieces.append(message)
        await self.reads.wait()

    @property
    def body(self) -> bytes:
        return b"".join(piece["body"] for piece in self.pieces)


@driven
@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 7])
async def test_an_answer_comes_whole_in_pieces_of_a_bounded_size(size: int) -> None:
    memory, client, body = AnswerMemory(), Client(), bytes(range(256)) * (size // 256 + 1)
    await memory.send(client.send, memoryview(body)[:size])
    assert client.body == body[:size]
    assert max(len(piece["body"]) for piece in client.pieces) <= PIECE
    assert [piece.get("more_body", False) for piece in client.pieces] == [True] * (len(client.pieces) - 1) + [False]
    assert memory.held == 0


@driven
async def test_the_oldest_are_cut_off_to_make_room_and_the_newest_is_served() -> None:
    memory, body = AnswerMemory(10 * PIECE), bytes(4 * PIECE)
    stuck = [Client(reads=False) for _ in range(3)]
    sending = []
    for client in stuck:
        sending.append(asyncio.create_task(memory.send(client.send, body)))
        await eventually(lambda client=client: bool(client.pieces))  # type: ignore[misc]
    with pytest.raises(DisconnectedError):
        await sending[0]
    assert memory.held == 8 * PIECE
    served = Client()
    await memory.send(served.send, body)
    assert served.body == body
    with pytest.raises(DisconnectedError):
        await sending[1]
    stuck[2].reads.set()
    await sending[2]
    assert stuck[2].body == body
    assert memory.held == 0


@driven
async def test_an_answer_that_is_larger_than_all_there_may_be_is_sent_alone() -> None:
    memory, client = AnswerMemory(PIECE), Client()
    await memory.send(client.send, bytes(5 * PIECE))
    assert len(client.body) == 5 * PIECE


@driven
async def test_a_piece_does_not_keep_the_whole_answer_in_memory() -> None:
    memory, client, body = AnswerMemory(), Client(), bytearray(2 * PIECE)
    await memory.send(client.send, memoryview(body))
    # A bytearray of which anybody has a view cannot be resized.
    del client.pieces[0]
    body.clear()
    assert len(client.body) == PIECE


@driven
async def test_one_that_is_given_up_for_another_reason_lets_go_of_its_share() -> None:
    memory, client = AnswerMemory(), Client(reads=False)
    sending = asyncio.create_task(memory.send(client.send, bytes(2 * PIECE)))
    await eventually(lambda: memory.held > 0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert memory.held == 0


@driven
async def test_large_answers_of_a_burst_are_built_when_there_is_room_for_them() -> None:
    """All are asked for at one moment, and nobody reads: at no time is more than that held, and one that is being built."""
    memory, alive, most = AnswerMemory(4 * BUILT_ALONE), 0, 0

    async def answer() -> None:
        nonlocal alive, most
        async with memory.building(BUILT_ALONE):
            alive += 1
            most = max(most, alive)
            body = bytes(BUILT_ALONE)
        try:
            with contextlib.suppress(DisconnectedError):
                await memory.send(Client(reads=False).send, body)
        finally:
            alive -= 1

    answering = [asyncio.create_task(answer()) for _ in range(40)]
    await asyncio.wait(answering[:36])
    assert most == 5
    for task in answering:
        task.cancel()


@driven
async def test_small_answers_wait_for_nobody() -> None:
    memory = AnswerMemory()
    async with memory.building(BUILT_ALONE), memory.building(BUILT_ALONE - 1):
        pass
