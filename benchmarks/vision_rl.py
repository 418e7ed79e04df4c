"""An RL step as `examples/vision_rl/geometry` takes it, through the SDK, in seconds by part: with beginnings that
datums share computed once, and with all datums whole.

    python benchmarks/vision_rl.py [--shape 4b] [--layers N] [--sides 160 1024] [--rounds 2] [--server OPTIONS] [--cpu]

A step has new weights in the sampler, 8 groups of 8 episodes on a picture each, and training on them. An episode has
all three turns, with answers of 24 tokens each, as many as a call of the tool has: random weights end none sooner. Its
environment takes no time here.
Pictures are new in each step, of the example's 160 x 160 pixels, and of 1,024 x 1,024, about 1,000 tokens. In every
other step each datum begins with another token, so that none is shared. `--cpu` rehearses with the tiny model.
"""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tinker
import tinker.types as types

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu import RANK
from benchmarks.gpu_server import NAME, STEP, first_answer, prepare
from benchmarks.handover import Times
from benchmarks.shapes import SHAPES
from tests.factories import make_renderer, photo
from tests.models import make_tiny_vl
from tests.servers import Server, sdk_input
from tinker_server.api_schemas.inputs import Chunk, EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.backends.inputs.rendering import Renderer

GROUPS, GROUP_SIZE, TURNS = 8, 8, 3
"""As `examples/vision_rl/teach.py` and `geometry.py` have them."""
BEFORE, QUESTION, ANSWER, FEEDBACK = 4, 60, 24, 30
"""Tokens before the picture, of the question behind it, of an answer, and between two turns."""


@dataclass
class Episode:
    """A picture, and what was said of it."""

    image: ImageChunk
    begin: list[int]
    behind: list[int]
    """Tokens behind the picture."""
    logprobs: list[float]
    """Of tokens behind the picture; 0 where they are not sampled."""

    def given(self, first: int | None = None) -> types.ModelInput:
        """Return the prompt, or with `first` in place of its first token the input of a datum."""
        begin = self.begin if first is None else [first, *self.begin[1:]]
        behind = self.behind if first is None else self.behind[:-1]
        before, after = (EncodedTextChunk(tokens=np.array(tokens, np.int32)) for tokens in (begin, behind))
        found: types.ModelInput = sdk_input(ModelInput(chunks=[before, self.image, after]))
        return found

    def say(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Go on by tokens, which were sampled if they have log probabilities."""
        self.behind += tokens
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    def datum(self, first: int, num_before: int, advantage: float) -> types.Datum:
        """Return the datum that begins with the token `first`; the question has `num_before` tokens before it."""
        logprobs = np.array([0.0] * (num_before - 1) + self.logprobs, np.float32)
        targets = np.array([0] * (num_before - 1) + self.behind)
        advantages = np.where(logprobs == 0, 0, advantage).astype(np.float32)
        rows = {"target_tokens": targets, "logprobs": logprobs, "advantages": advantages}
        tensors = {name: types.TensorData.from_numpy(values) for name, values in rows.items()}
        return types.Datum(model_input=self.given(first), loss_fn_inputs=tensors)


def play(sampling: tinker.SamplingClient, side: int, seed: int) -> list[Episode]:
    """Sample all turns of all episodes, group by group side by side."""
    random = np.random.default_rng(seed)
    params = types.SamplingParams(max_tokens=ANSWER, stop=[])

    def words(count: int) -> list[int]:
        return [int(token) for token in random.integers(1, 250, count)]

    begin, episodes = words(BEFORE), []
    for number in range(GROUPS):
        image = ImageChunk(data=photo(side, side, 1000 * seed + number, format="jpeg"), format="jpeg")
        question = words(QUESTION)
        episodes += [Episode(image, begin, [*question], [0.0] * QUESTION) for _ in range(GROUP_SIZE)]
    for turn in range(TURNS):
        if turn:
            for episode in episodes:
                episode.say(words(FEEDBACK))
        size = 1 if turn else GROUP_SIZE  # all samples of a question at once, then each episode by itself
        waiting = [sampling.sample(episode.given(), size, params) for episode in episodes[::size]]
        drawn = [sequence for future in waiting for sequence in future.result().sequences]
        for episode, sequence in zip(episodes, drawn, strict=True):
            episode.say(sequence.tokens, sequence.logprobs)
    return episodes


def take_step(training: tinker.TrainingClient, renderer: Renderer, times: Times, work: tuple[int, int, bool]) -> float:
    """Take a step by parts; `work`: the side of pictures, a seed, and whether datums are whole. Return the number of
    tokens that were shared."""
    side, seed, whole = work
    times.begin()
    sampling = training.save_weights_and_get_sampling_client().result()
    times.end("new weights to the sampler")
    episodes = play(sampling, side, seed)
    times.end("samples of three turns")
    chunks: list[Chunk] = [EncodedTextChunk(tokens=np.array(episodes[0].begin, np.int32)), episodes[0].image]
    num_before = renderer.layout(ModelInput(chunks=chunks), "the prompt").num_tokens
    advantages = np.random.default_rng(seed).choice([-1.0, 1.0], len(episodes))
    data = [
        episode.datum(1 + number if whole else episode.begin[0], num_before, float(advantages[number]))
        for number, episode in enumerate(episodes)
    ]
    times.end("datums")
    passed, stepped = training.forward_backward(data, "importance_sampling"), training.optim_step(STEP)
    output = passed.result()
    times.end("forward_backward")
    stepped.result()
    times.end("optim_step")
    return float(output.metrics.get("shared_tokens:sum", 0))


def main() -> None:
    """Take steps in turn of both kinds, at each side of pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="4b")
    parser.add_argument("--layers", type=int, help="of the decoder (the shape's)")
    parser.add_argument("--sides", type=int, nargs="+", default=[160, 1024], help="of square pictures, in pixels")
    parser.add_argument("--rounds", type=int, default=2, help="steps of each kind after the first")
    parser.add_argument("--server", default="", help="more options of the server")
    parser.add_argument("--cpu", action="store_true", help="rehearse with the tiny model on a CPU")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model, switches = Path(folder) / "model", shlex.split(given.server)
        if given.cpu:
            make_tiny_vl(model)
            switches += ["--device", "cpu"]
        else:
            # In a process that ends: this one has no context on the GPU, for which no plan has room.
            shape = replace(SHAPES[given.shape], num_layers=given.layers)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
                card, peak = other.submit(prepare, model, shape).result()
            switches += ["--device", "cuda"]
            print(f"{card}, {peak / 1e12:.0f} TFLOP/s", flush=True)
        server = Server(Path(folder) / "data", {NAME: model}, *switches)
        server.patience_s = 900
        try:
            first_answer(server, "first")
            training = server.client().create_lora_training_client(NAME, rank=RANK).result()
            renderer = make_renderer(model)
            for side in given.sides:
                times = {"shared": Times(), "whole": Times()}
                shared: dict[str, float] = {}
                for number in range(given.rounds + 1):
                    for place, kind in enumerate(times):
                        work = side, 2 * number + place, kind == "whole"
                        shared[kind] = take_step(training, renderer, times[kind], work)
                for kind, parts in times.items():
                    parts.show(f"pictures of {side} x {side}, {kind}: {shared[kind]:.0f} tokens shared")
                assert shared["whole"] == 0, "each datum begins with a token of its own"
        finally:
            server.stop()


if __name__ == "__main__":
    main()
