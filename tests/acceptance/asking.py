"""Geometry, taught to ask the tool first: python asking.py [NAME=VALUE ...], the options of teach.py.

Runs in the cookbook's environment. Its warm start asks about 3, then boxes the only one of ANSWERS that the tool's
words leave; RL goes on from there, on questions that are written into the file of `records` and the one beside it.
"""

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "vision_rl"))
import chz
import geometry
import prepare
import teach
from records import Record, make_row
from tinker_cookbook.renderers import Message
from tinker_cookbook.renderers.base import ToolCall

ANSWERS = {"too small": 9, "score 1.0": 3, "too large": 1}
"""By what the tool says of 3."""


def seeds(count: int, seed: int) -> list[int]:
    """Seeds of figures whose answer is one of ANSWERS, of each equally many."""
    draw, found = random.Random(seed), {str(answer): list[int]() for answer in ANSWERS.values()}
    while any(len(one) < count for one in found.values()):
        figure_seed = draw.randrange(2**31)
        found.get(geometry.figure(figure_seed)[2], []).append(figure_seed)
    return [one for group in found.values() for one in group[:count]]


TAUGHT = seeds(100, 1)


def asking(seed: int) -> list[Message]:
    """A conversation that knows nothing of the picture: a call, the tool's words, and what they leave."""
    image, text, truth = geometry.figure(random.Random(seed).choice(TAUGHT))
    function = ToolCall.FunctionBody(name=geometry.TOOL, arguments=json.dumps({"answer": "3"}))
    call = ToolCall(function=function, id="0")
    said = geometry.GeometryEnv(Record([], geometry.ENV_CLASS, "rule", truth))._feedback(call)
    return [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        said,
        {"role": "assistant", "content": f"\\boxed{{{truth}}}"},
    ]


def records(path: Path, count: int, seed: int) -> None:
    """Write `count` questions of each answer."""
    rows = []
    for figure_seed in seeds(count, seed):
        image, text, truth = geometry.figure(figure_seed)
        rows.append(make_row(image, text, geometry.ENV_CLASS, truth))
    prepare.write(path, rows)


def main(options: teach.Options) -> None:
    """Write the questions, then teach."""
    assert options.records is not None
    train = Path(options.records)
    records(train, 20, 2)
    records(train.with_name(f"validation{train.suffix}"), 20, 3)
    teach.TASKS["geometry"] = replace(teach.TASKS["geometry"], warm_start=asking)
    teach.main("geometry", options)


if __name__ == "__main__":
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    main(chz.entrypoint(teach.Options, argv=sys.argv[1:]))
