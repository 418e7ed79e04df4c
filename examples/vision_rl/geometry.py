r"""Questions about a picture, with a tool that scores an answer: text feedback, at most three turns.

    user: [picture] How many squares does the rectangle have? ...
    assistant: <tool_call>{"name": "calc_score", "arguments": {"answer": "10"}}</tool_call>
    tool: score 0.0: the answer 10 is too small; try again
    assistant: \boxed{12}

The reward is 1 where the answer in the box is right, else 0.
"""

import json
import random
import re
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import math_verify
from PIL import Image, ImageDraw
from records import BadRecord, Record, read_records
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.renderers.base import ToolCall
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult

ENV_CLASS = "geometry3k"
MAX_TURNS = 3
TOOL = "calc_score"
SIDE, CELL = 160, 48
"""Sides of a picture and of a square in it, in pixels."""
LARGEST = 3
"""Columns and rows of a figure."""
INSTRUCTIONS = f"Ask {TOOL} how good an answer is, or give your answer as \\boxed{{...}}. You have {MAX_TURNS} turns."
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
"""A box whose content may have braces within braces, as fractions of roots have."""
MAX_ANSWER = 100
"""Characters of an answer that is compared as mathematics."""


@dataclass
class GeometryEnv(MessageEnv):
    """One question."""

    record: Record
    messages: list[Message] = field(default_factory=list)
    turns: int = 0

    async def initial_observation(self) -> list[Message]:
        """The record's own messages."""
        self.messages = list(self.record.messages)
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Judge a boxed answer, or answer a call of the tool."""
        self.turns += 1
        if not get_text_content(message).strip():
            # A renderer writes a line break before a call by itself: with the sampled one the next prompt would have
            # two, and would not go on from this turn's tokens.
            message = {**message, "content": ""}
        self.messages = [*self.messages, message]
        boxed = _BOX.findall(get_text_content(message))
        right = bool(boxed) and same(boxed[-1], self._truth)
        calls = message.get("tool_calls") or []
        if boxed or not calls or self.turns == MAX_TURNS:
            return MessageStepResult(
                reward=float(right),
                episode_done=True,
                next_messages=self.messages,
                metrics={"right": float(right), "turns": float(self.turns)},
            )
        self.messages = [*self.messages, *(self._feedback(call) for call in calls)]
        return MessageStepResult(reward=0.0, episode_done=False, next_messages=self.messages)

    @property
    def _truth(self) -> str:
        assert self.record.ground_truth is not None, "`geometry_task` refuses such records"
        return self.record.ground_truth

    def _feedback(self, call: ToolCall) -> Message:
        text = self._score(call)
        return {"role": "tool", "name": call.function.name, "tool_call_id": call.id or "", "content": text}

    def _score(self, call: ToolCall) -> str:
        if call.function.name != TOOL:
            return f"there is no tool {call.function.name}; use {TOOL}"
        try:
            answer = str(json.loads(call.function.arguments)["answer"])
        except (ValueError, KeyError, TypeError):
            return f'{TOOL} takes {{"answer": "..."}}'
        if same(answer, self._truth):
            return "score 1.0: give this answer in the box"
        return f"score 0.0: the answer {answer} is {_fault(answer, self._truth)}; try again"


def _fault(answer: str, truth: str) -> str:
    """Describe a wrong answer: by its order if both are numbers."""
    try:
        return "too small" if float(answer) < float(truth) else "too large"
    except ValueError:
        return "wrong"


def same(answer: str, truth: str) -> bool:
    """Return whether two answers are equal as numbers, as texts, or as mathematics in LaTeX."""
    try:
        return abs(float(answer) - float(truth)) < 1e-6
    except ValueError:
        pass
    if answer.strip().lower() == truth.strip().lower():
        return True
    if len(answer) > MAX_ANSWER:
        return False
    return bool(math_verify.verify(math_verify.parse(f"${truth}$"), math_verify.parse(f"${answer}$")))


def figure(seed: int) -> tuple[Image.Image, str, str]:
    """A rectangle of unit squares, the question, and how many squares it has."""
    draw = random.Random(seed)
    columns, rows = draw.randint(1, LARGEST), draw.randint(1, LARGEST)
    image = Image.new("RGB", (SIDE, SIDE), "white")
    canvas = ImageDraw.Draw(image)
    left, top = draw.randint(0, SIDE - columns * CELL - 1), draw.randint(0, SIDE - rows * CELL - 1)
    for column in range(columns):
        for row in range(rows):
            x, y = left + column * CELL, top + row * CELL
            canvas.rectangle((x, y, x + CELL, y + CELL), outline="black", fill=(90, 140, 230), width=4)
    return image, f"How many squares does the rectangle have? {INSTRUCTIONS}", str(columns * rows)


def geometry_task(path: Path) -> partial[GeometryEnv]:
    """The task of a file of records. Raises BadRecord."""
    records = read_records(path)
    for number, record in enumerate(records):
        if record.ground_truth is None:
            raise BadRecord(f"{path.name} row {number}: it has no reward_spec, whose ground_truth answers are held to")
    return partial(_of_seed, [instructed(record) for record in records])


def instructed(record: Record) -> Record:
    """Add the instructions to a question that says nothing of the box, as published ones do."""
    last = record.messages[-1]
    if "\\boxed" in get_text_content(last):
        return record
    asked = {"role": "user", "content": [*_parts(last), {"type": "text", "text": INSTRUCTIONS}]}
    return replace(record, messages=[*record.messages[:-1], asked])


def _parts(message: Message) -> list[Any]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _of_seed(records: list[Record], seed: int) -> GeometryEnv:
    return GeometryEnv(records[random.Random(seed).randrange(len(records))])


def warm_start(seed: int) -> list[Message]:
    """A conversation of the right form that knows no answer: up to two calls of the tool, each with a guess that agrees
    with all that the tool has said, then such a guess in the box. RL has to find out what the picture shows, and that
    asking first is worth a turn."""
    image, text, truth = figure(seed)
    draw = random.Random(f"warm-{seed}")
    env = GeometryEnv(Record([], ENV_CLASS, "rule", truth))
    possible = sorted({columns * rows for columns in range(1, LARGEST + 1) for rows in range(1, LARGEST + 1)})
    messages: list[Message] = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}
    ]
    for number in range(draw.randrange(MAX_TURNS)):
        guess = draw.choice(possible)
        arguments = json.dumps({"answer": str(guess)})
        call = ToolCall(function=ToolCall.FunctionBody(name=TOOL, arguments=arguments), id=str(number))
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, env._feedback(call)]
        possible = [one for one in possible if _order(one, guess) == _order(int(truth), guess)]
    messages.append({"role": "assistant", "content": f"\\boxed{{{draw.choice(possible)}}}"})
    return messages


def _order(one: int, other: int) -> int:
    return (one > other) - (one < other)
