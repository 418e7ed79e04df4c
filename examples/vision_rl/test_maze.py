"""Moves, pictures and rewards of the maze, worked out by hand."""

import asyncio
from typing import Any

import pytest
from maze import CELLS, DISTANCES, MOVES, PIXELS, SIDE, SPARE_MOVES, Cell, Maze, MazeEnv, maze, maze_env, warm_start
from PIL import Image
from tinker_cookbook.rl.message_env import MessageStepResult

RED, GREEN, BLACK, WHITE = (220, 40, 40), (40, 180, 60), (0, 0, 0), (255, 255, 255)


def answer(move: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"<action>{move}</action>"}


def played(env: MazeEnv, *answers: dict[str, Any]) -> list[MessageStepResult]:
    async def play() -> list[MessageStepResult]:
        await env.initial_observation()
        return [await env.step(one) for one in answers]

    return asyncio.run(play())


def last_picture(step: MessageStepResult) -> Image.Image:
    images = [part["image"] for part in step.next_messages[-1]["content"] if part["type"] == "image"]
    image: Image.Image = images[0]
    assert len(images) == 1
    return image


def colour(image: Image.Image, cell: Cell) -> tuple[int, ...]:
    """Return the colour in the middle of a cell."""
    middle = [(2 * place + 1) * PIXELS // (2 * SIDE) for place in cell]
    return image.getpixel((middle[0], middle[1]))  # type: ignore[return-value]


@pytest.fixture
def env() -> MazeEnv:
    """The player at the upper left, a wall below it, the goal at the lower right: four moves, and two to spare."""
    return MazeEnv(Maze(frozenset({(0, 1), (2, 1)}), player=(0, 0), goal=(2, 2)), 6)


def test_each_picture_shows_the_player_where_the_move_has_led(env: MazeEnv) -> None:
    steps = played(env, answer("right"), answer("down"), answer("left"), answer("up"))
    cells = [(1, 0), (1, 1), (1, 1), (1, 0)]  # to the left of the middle is a wall
    for step, cell in zip(steps, cells, strict=True):
        assert (step.reward, step.episode_done) == (0.0, False)
        found = {place: colour(last_picture(step), place) for place in CELLS}
        expected = dict.fromkeys(CELLS, WHITE) | {(0, 1): BLACK, (2, 1): BLACK, (2, 2): GREEN, cell: RED}
        assert found == expected


@pytest.mark.parametrize("move", ["left", "up", "down"])
def test_a_wall_and_the_edge_stop_the_player_and_the_move_is_counted(env: MazeEnv, move: str) -> None:
    (step,) = played(env, answer(move))
    assert colour(last_picture(step), (0, 0)) == RED and not step.episode_done
    assert env.moves_left == 5


def test_the_goal_gives_the_whole_reward(env: MazeEnv) -> None:
    *before, last = played(env, *map(answer, ("right", "down", "down", "right")))
    assert [step.reward for step in before] == [0.0] * 3
    assert (last.reward, last.episode_done, last.metrics) == (1.0, True, {"reached": 1.0, "formed": 1.0})


def test_moves_that_run_out_leave_the_reward_of_the_form(env: MazeEnv) -> None:
    steps = played(env, *map(answer, ["left"] * 6))
    assert [step.episode_done for step in steps] == [False] * 5 + [True]
    assert steps[-1].reward == pytest.approx(0.2) and steps[-1].metrics["reached"] == 0.0


@pytest.mark.parametrize("content", ["left", "<action>jump</action>", "<action>up</action> or so", ""])
@pytest.mark.parametrize(("num_good", "reward"), [(0, 0.0), (1, 0.2 / 2), (3, 0.2 * 3 / 4)])
def test_an_answer_of_another_form_ends_the_episode(env: MazeEnv, content: str, num_good: int, reward: float) -> None:
    *_, last = played(
        env, *map(answer, ["right", "left", "right"][:num_good]), {"role": "assistant", "content": content}
    )
    assert last.episode_done and last.reward == pytest.approx(reward)


def test_a_shortest_path_always_reaches_the_goal_and_a_shorter_one_never() -> None:
    lengths = set()
    for seed in range(60):
        path = maze(seed).shortest_path()
        assert path is not None
        lengths.add(len(path))
        env = maze_env(seed)
        assert env.moves_left == len(path) + SPARE_MOVES
        steps = played(env, *map(answer, path))
        assert [step.episode_done for step in steps] == [False] * (len(path) - 1) + [True]
        assert sum(step.reward for step in steps) == 1.0
        assert len(path) >= sum(abs(a - b) for a, b in zip(maze(seed).player, maze(seed).goal, strict=True))
    assert lengths == set(range(DISTANCES[0], DISTANCES[1] + 1)), "mazes of every length are drawn"


def test_every_direction_is_the_first_of_some_shortest_path() -> None:
    assert {(maze(seed).shortest_path() or [""])[0] for seed in range(60)} == set(MOVES)


def test_each_picture_of_the_warm_start_shows_where_the_moves_before_it_have_led() -> None:
    for seed in range(20):
        messages = warm_start(seed)
        place = maze(seed)
        cells, (column, row) = [place.player], place.player
        for told in messages[1::2]:
            move = told["content"].removeprefix("<action>").removesuffix("</action>")
            column, row = column + MOVES[move][0], row + MOVES[move][1]
            cells.append((column, row))
        assert cells[-1] == place.goal and len(set(cells)) == len(cells) > 2
        for message, player in zip(messages[::2], cells[:-1], strict=True):
            picture = message["content"][0]["image"]
            assert [cell for cell in CELLS if colour(picture, cell) == RED] == [player]
            assert [cell for cell in CELLS if colour(picture, cell) == GREEN] == [place.goal]
