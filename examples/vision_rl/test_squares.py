"""Pictures and rewards of the two squares."""

import asyncio
import random

import pytest
import squares
from squares import COLOURS, SIDE, SPREAD, Squares
from tinker_cookbook.rl.message_env import MessageStepResult


def played(episode: Squares, *answers: str) -> list[MessageStepResult]:
    async def play() -> list[MessageStepResult]:
        await episode.initial_observation()
        return [await episode.step({"role": "assistant", "content": one}) for one in answers]

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [
        (("red", "blue"), [0.5, 0.5]),
        ((" Red\n", "green"), [0.5, 0.0]),
        (("blue", "red"), [0.0, 0.0]),  # the right colours in the wrong turns
        (("yellow", "blue"), [0.0, 0.5]),
        (("red and blue", ""), [0.0, 0.0]),
    ],
)
def test_each_turn_is_rewarded_for_its_own_square(answers: tuple[str, str], rewards: list[float]) -> None:
    draw = random.Random(0)
    episode = Squares(["red", "blue"], [squares.picture(name, draw) for name in ("red", "blue")])
    steps = played(episode, *answers)
    assert [step.reward for step in steps] == rewards
    assert [step.episode_done for step in steps] == [False, True]
    assert [step.metrics for step in steps] == [{f"right_{n + 1}": 2 * reward} for n, reward in enumerate(rewards)]


def test_the_second_picture_comes_only_after_the_first_answer() -> None:
    episode = squares.squares(4)
    (first,) = asyncio.run(episode.initial_observation())
    step = asyncio.run(episode.step({"role": "assistant", "content": "red"}))
    assert [message["role"] for message in step.next_messages] == ["user", "assistant", "user"]
    shown = [part["image"] for part in (first["content"][0], step.next_messages[-1]["content"][0])]
    assert [image is picture for image, picture in zip(shown, episode.pictures, strict=True)] == [True, True]


def test_a_picture_has_a_square_of_its_colour_on_gray() -> None:
    for seed in range(20):
        episode = squares.squares(seed)
        for name, image in zip(episode.colours, episode.pictures, strict=True):
            counted = {colour: count for count, colour in image.getcolors() or []}
            assert counted.pop((128, 128, 128)) + sum(counted.values()) == SIDE * SIDE
            (shade,) = counted
            assert isinstance(shade, tuple)
            assert all(abs(a - b) <= SPREAD for a, b in zip(shade, COLOURS[name], strict=True))


def test_all_colours_are_shown_in_both_turns() -> None:
    for turn in range(2):
        assert {squares.squares(seed).colours[turn] for seed in range(60)} == set(COLOURS)
