"""A maze that is seen, not told: after each move the picture is drawn again.

    user: [picture] Reach the green cell.     assistant: <action>left</action>
    user: [picture]                           assistant: <action>up</action>

The reward of an episode is 0.8 for reaching the goal and 0.2 times the part of its answers that were of the right
form. Running into a wall leaves the player where it is. An answer of another form ends the episode.
"""

import random
import re
from collections import deque
from dataclasses import dataclass, field, replace

from PIL import Image, ImageDraw
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult

Cell = tuple[int, int]
"""Column and row."""
SIDE = 3
"""Cells of the maze, across and down."""
PIXELS = 160
"""Side of a picture: 25 tokens. A ninth of it is large enough as a cell for a small tower; one token is not."""
WALLS = 2
DISTANCES = (2, 4)
"""Shortest paths from start to goal that are asked for, in moves."""
SPARE_MOVES = 2
"""Moves that are allowed beyond the shortest path."""
CELLS: list[Cell] = [(column, row) for column in range(SIDE) for row in range(SIDE)]
MOVES: dict[str, Cell] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
TASK_REWARD, FORMAT_REWARD = 0.8, 0.2
_ACTION = re.compile(r"<action>(left|right|up|down)</action>")


@dataclass(frozen=True)
class Maze:
    """Positions of walls, goal and player."""

    walls: frozenset[Cell]
    player: Cell
    goal: Cell

    def after(self, move: str) -> "Maze":
        """The player one cell further, or where it was."""
        cell = (self.player[0] + MOVES[move][0], self.player[1] + MOVES[move][1])
        return replace(self, player=cell) if self._free(cell) else self

    def _free(self, cell: Cell) -> bool:
        return cell not in self.walls and all(0 <= place < SIDE for place in cell)

    def shortest_path(self) -> list[str] | None:
        """Moves to the goal; None if there is no way. Among equally short ways the first in the order of MOVES."""
        seen = {self.player}
        waiting: deque[tuple[Maze, list[str]]] = deque([(self, [])])
        while waiting:
            maze, path = waiting.popleft()
            if maze.player == self.goal:
                return path
            for move in MOVES:
                further = maze.after(move)
                if further.player not in seen:
                    seen.add(further.player)
                    waiting.append((further, [*path, move]))
        return None

    def picture(self) -> Image.Image:
        """Walls black, the goal green, the player red."""
        image = Image.new("RGB", (PIXELS, PIXELS), "white")
        canvas = ImageDraw.Draw(image)
        for cell in self.walls:
            canvas.rectangle(_box(cell), fill="black")
        canvas.rectangle(_box(self.goal), fill=(40, 180, 60))
        canvas.rectangle(_box(self.player), fill=(220, 40, 40))
        return image


def _box(cell: Cell) -> tuple[int, int, int, int]:
    left, top = cell[0] * PIXELS // SIDE, cell[1] * PIXELS // SIDE
    return left, top, (cell[0] + 1) * PIXELS // SIDE - 1, (cell[1] + 1) * PIXELS // SIDE - 1


def maze(seed: int) -> Maze:
    """The maze of a seed, whose goal can be reached in a number of moves between DISTANCES."""
    draw = random.Random(seed)
    while True:
        player, goal, *walls = draw.sample(CELLS, 2 + WALLS)
        found = Maze(frozenset(walls), player, goal)
        path = found.shortest_path()
        if path is not None and DISTANCES[0] <= len(path) <= DISTANCES[1]:
            return found


def shown(place: Maze, first: bool) -> Message:
    """Return the user's message: the picture, and at first the task."""
    parts: list[dict[str, object]] = [{"type": "image", "image": place.picture()}]
    if first:
        parts.append({"type": "text", "text": "Reach the green cell."})
    return {"role": "user", "content": parts}


@dataclass
class MazeEnv(MessageEnv):
    """One episode."""

    place: Maze
    moves_left: int
    messages: list[Message] = field(default_factory=list)
    answers: int = 0

    async def initial_observation(self) -> list[Message]:
        """The whole maze."""
        self.messages = [shown(self.place, first=True)]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Move, then show where that has led."""
        self.messages = [*self.messages, message]
        self.answers += 1
        found = _ACTION.fullmatch(get_text_content(message).strip())
        if found is None:
            return self._ended(reached=False, formed=(self.answers - 1) / self.answers)
        self.place = self.place.after(found[1])
        self.moves_left -= 1
        if self.place.player == self.place.goal or self.moves_left == 0:
            return self._ended(reached=self.place.player == self.place.goal, formed=1.0)
        self.messages = [*self.messages, shown(self.place, first=False)]
        return MessageStepResult(reward=0.0, episode_done=False, next_messages=self.messages)

    def _ended(self, *, reached: bool, formed: float) -> MessageStepResult:
        return MessageStepResult(
            reward=TASK_REWARD * reached + FORMAT_REWARD * formed,
            episode_done=True,
            next_messages=self.messages,
            metrics={"reached": float(reached), "formed": formed},
        )


def maze_env(seed: int) -> MazeEnv:
    """The episode of a seed."""
    place = maze(seed)
    path = place.shortest_path()
    assert path is not None
    return MazeEnv(place, len(path) + SPARE_MOVES)


def warm_start(seed: int) -> list[Message]:
    """A conversation that walks a shortest path."""
    place = maze(seed)
    path = place.shortest_path()
    assert path is not None
    messages: list[Message] = []
    for number, move in enumerate(path):
        messages.append(shown(place, first=number == 0))
        messages.append({"role": "assistant", "content": f"<action>{move}</action>"})
        place = place.after(move)
    return messages
