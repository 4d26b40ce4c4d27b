"""Requests that arrive at once begin a few in each iteration of the event loop, in their order."""

import asyncio

import pytest

pytest.importorskip("starlette")

from atomc.runtime.server.http.turns import TURNS, Turns


async def begun_in_each_iteration(
    num_tasks: int, cancelled: tuple[int, ...] = ()
) -> list[list[int]]:
    """The tasks that got their turn in each iteration, until none is left."""
    turns, begun = Turns(), []

    async def task(number: int) -> None:
        await turns.take()
        begun[-1].append(number)

    tasks = [asyncio.create_task(task(number)) for number in range(num_tasks)]
    for number in range(2 * num_tasks):
        begun.append([])
        await asyncio.sleep(0)
        if number == 0:
            for each in cancelled:
                tasks[each].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [numbers for numbers in begun if numbers]


def test_tasks_of_a_burst_begin_a_few_at_a_time_in_their_order() -> None:
    begun = asyncio.run(begun_in_each_iteration(5 * TURNS + 3))
    assert [number for numbers in begun for number in numbers] == list(range(5 * TURNS + 3))
    assert max(map(len, begun)) == TURNS


def test_a_task_that_is_cancelled_while_it_waits_leaves_its_turn_to_the_next() -> None:
    begun = asyncio.run(begun_in_each_iteration(3 * TURNS, cancelled=(TURNS, TURNS + 3)))
    numbers = [number for numbers in begun for number in numbers]
    assert numbers == [i for i in range(3 * TURNS) if i not in (TURNS, TURNS + 3)]
    assert max(map(len, begun)) == TURNS


def test_a_task_alone_does_not_wait() -> None:
    async def run() -> None:
        turns = Turns()
        for _ in range(3 * TURNS):
            turn = turns.take()
            with pytest.raises(StopIteration):
                turn.send(None)
            await asyncio.sleep(0)

    asyncio.run(run())
