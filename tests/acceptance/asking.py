"""Geometry, taught to ask the tool first: python asking.py [NAME=VALUE ...], the options of teach.py and `records`.

Runs in the cookbook's environment. Its warm start asks about 3, then boxes the only one of ANSWERS that the tool's
words leave. RL goes on from there, and the weights are measured on validation questions twice: with the tool as it is,
and with one that says the opposite.

Prints a line of JSON: reward and turns of an episode, with either tool.
"""

import asyncio
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "vision_rl"))
import chz
import geometry
import prepare
import teach
from evaluate_policy import Options, evaluate
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


def opposite(answer: str, truth: str) -> str:
    """Describe a wrong answer as what it is not."""
    return "too large" if float(answer) < float(truth) else "too small"


def records(path: Path, count: int, seed: int) -> None:
    """Write `count` questions of each answer."""
    rows = []
    for figure_seed in seeds(count, seed):
        image, text, truth = geometry.figure(figure_seed)
        rows.append(make_row(image, text, geometry.ENV_CLASS, truth))
    prepare.write(path, rows)


def main(options: teach.Options) -> dict[str, Any]:
    """Teach, then measure."""
    assert options.records is not None
    train = Path(options.records)
    records(train, 20, 2)
    records(train.with_name(f"validation{train.suffix}"), 20, 3)
    teach.TASKS["geometry"] = replace(teach.TASKS["geometry"], warm_start=asking)
    teach.main("geometry", options)
    (*_, last) = (Path(options.log_path) / "rl" / "checkpoints.jsonl").read_text().splitlines()
    shared = {name: getattr(options, name) for name in ("base_url", "model_name", "model_dir", "records")}
    weights = json.loads(last)["sampler_path"]
    arguments = {name: value for name, value in shared.items() if value is not None}
    arguments |= {"weights": weights, "episodes": 60}
    measured = chz.entrypoint(Options, argv=[f"{name}={value}" for name, value in arguments.items()])
    found = {"tool": asyncio.run(evaluate("geometry", measured))}
    geometry._fault = opposite
    found["opposite"] = asyncio.run(evaluate("geometry", measured))
    return found


if __name__ == "__main__":
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    print(json.dumps(main(chz.entrypoint(teach.Options, argv=sys.argv[1:]))))
