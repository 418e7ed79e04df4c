"""Two turns, a coloured square each: the second picture comes only after the first answer.

    user: [picture] What colour is the square?     assistant: red
    user: [picture] And this one?                  assistant: blue

Half of the reward for each colour that is named.
"""

import random
from dataclasses import dataclass, field

from PIL import Image, ImageDraw
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult

COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 210),
    "yellow": (235, 215, 50),
}
SIDE = 160
"""Side of a picture in pixels: 25 tokens."""
QUESTIONS = ("What colour is the square?", "And this one?")
SPREAD = 15
"""Shades of a colour differ by so much in each channel."""


def picture(colour: str, draw: random.Random) -> Image.Image:
    """A square of a shade of `colour` somewhere on gray."""
    image = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    side = draw.randint(96, 144)
    left, top = draw.randint(0, SIDE - side), draw.randint(0, SIDE - side)
    shade = tuple(min(255, max(0, value + draw.randint(-SPREAD, SPREAD))) for value in COLOURS[colour])
    ImageDraw.Draw(image).rectangle((left, top, left + side, top + side), fill=shade)
    return image


def question(turn: int, image: Image.Image) -> Message:
    """The picture, then the words."""
    return {
        "role": "user",
        "content": [{"type": "image", "image": image}, {"type": "text", "text": QUESTIONS[turn]}],
    }


@dataclass
class Squares(MessageEnv):
    """One episode. `colours` are what is shown."""

    colours: list[str]
    pictures: list[Image.Image]
    messages: list[Message] = field(default_factory=list)
    turn: int = 0

    async def initial_observation(self) -> list[Message]:
        """The first picture."""
        self.messages = [question(0, self.pictures[0])]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Judge the answer; show the second picture after the first."""
        right = get_text_content(message).strip().lower() == self.colours[self.turn]
        reward = right / len(QUESTIONS)
        self.messages = [*self.messages, message]
        self.turn += 1
        done = self.turn == len(QUESTIONS)
        if not done:
            self.messages = [*self.messages, question(self.turn, self.pictures[self.turn])]
        return MessageStepResult(
            reward=reward, episode_done=done, next_messages=self.messages, metrics={f"right_{self.turn}": float(right)}
        )


def squares(seed: int) -> Squares:
    """The episode of a seed."""
    draw = random.Random(seed)
    colours = draw.choices(list(COLOURS), k=len(QUESTIONS))
    return Squares(colours, [picture(colour, draw) for colour in colours])


def warm_start(seed: int) -> list[Message]:
    """An episode that goes well."""
    episode = squares(seed)
    messages: list[Message] = []
    for turn, (colour, image) in enumerate(zip(episode.colours, episode.pictures, strict=True)):
        messages += [question(turn, image), {"role": "assistant", "content": colour}]
    return messages
