"""The trainer on one GPU, on datums that begin alike: tokens that they share computed once, and all datums whole.

    python benchmarks/shared_prefixes.py [--shape 4b] [--layers 36] [--texts] [--cases TEXT...]

Both in one run, on one trainer in this process: the milliseconds of a forward_backward whose images the tower has seen,
the peak of the memory, and how far apart both are: log probabilities in nats, and the gradient as a
part of its norm. `--texts`: no images, for a shape without a tower. `--cases`: those whose names contain any of these.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu import DEVICE, RANK, make_config, seconds
from benchmarks.shapes import SHAPES, make_model
from tests.factories import cross_entropy, photo, present
from tests.trainers import forward_backward, gradients, perturb, relative_distance
from tinker_server.api_schemas.inputs import Chunk, Datum, EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import EncodedBatch
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

SIDES = {1000: (1024, 1024), 340: (640, 544)}
"""Sides of an image of about so many tokens, in pixels."""


def words(length: int, random: np.random.Generator) -> EncodedTextChunk:
    """Make random tokens."""
    return EncodedTextChunk(tokens=random.integers(0, 250, length, dtype=np.int32))


def picture(num_tokens: int, seed: int) -> ImageChunk:
    """Make a photograph of about so many tokens."""
    return ImageChunk(data=photo(*SIDES[num_tokens], seed, format="jpeg"), format="jpeg")


def groups(num: int, prompt: int, answers: Sequence[int], *, image: bool = False) -> list[list[Chunk]]:
    """Make groups of answers to a prompt of text, or of an image with a question."""
    random, found = np.random.default_rng(0), []
    for number in range(num):
        begin: list[Chunk] = [picture(prompt, number), words(20, random)] if image else [words(prompt, random)]
        found += [[*begin, words(length, random)] for length in answers]
    return found


def episodes(num: int, turns: int, length: int, *, image: bool) -> list[list[Chunk]]:
    """Make episodes, each turn of which begins with all turns before, and has an image if `image`."""
    random, found = np.random.default_rng(1), []
    for number in range(num):
        begin: list[Chunk] = []
        for turn in range(turns):
            seed = 100 + number * turns + turn
            own = [picture(340, seed), words(length - 340, random)] if image else [words(length, random)]
            begin = [*begin, *own]
            found.append(begin)
    return found


def batch_of(inputs: Sequence[list[Chunk]], renderer: Renderer) -> EncodedBatch:
    """Make a cross_entropy of random targets."""
    random, data = np.random.default_rng(2), []
    for chunks in inputs:
        model_input = ModelInput(chunks=chunks)
        length, _ = renderer.layout(model_input, "datum")
        weights = np.full(length, 1e-3, np.float32)
        targets: dict[str, np.ndarray] = {"target_tokens": random.integers(0, 250, length), "weights": weights}
        data.append(Datum(model_input=model_input, loss_fn_inputs=targets))
    return cross_entropy(data)


def compare(rank: TrainerRank, name: str, batch: EncodedBatch) -> None:
    """Time a batch whole and shared, in turn, and print a line."""
    shares, found = rank.base.whole_below, {}
    work = partial(forward_backward, rank, "m", batch)
    for kind, whole_below in (("whole", None), ("shared", shares)):
        rank.base.whole_below = whole_below
        work()
        time.sleep(1)  # until what the tower made of images has gone to the host
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        took_s = seconds(work)
        gib = torch.cuda.max_memory_allocated() / 2**30
        rank.models["m"].clear_gradient()
        output = present(work())
        logprobs = np.concatenate([values["logprobs"] for values in output.loss_fn_outputs])
        found[kind] = took_s, gib, logprobs, gradients(rank, "m"), output.metrics.get("shared_tokens:sum", 0)
        rank.models["m"].clear_gradient()
    rank.base.whole_below = shares
    whole, shared = found["whole"], found["shared"]
    gap = np.abs(whole[2] - shared[2])
    print(f"{name}: {len(whole[2])} tokens, {shared[4]:.0f} of them shared")
    print(f"  whole {whole[0] * 1e3:.0f} ms, {whole[1]:.1f} GiB; shared {shared[0] * 1e3:.0f} ms, {shared[1]:.1f} GiB")
    print(f"  {whole[0] / shared[0]:.2f} times as fast, {shared[1] / whole[1]:.2f} of the memory")
    distance = relative_distance(shared[3].values(), whole[3].values())
    print(f"  apart by {gap.mean():.4f} nats on average and {gap.max():.3f} at most, gradients by {distance:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="4b")
    parser.add_argument("--layers", type=int, help="of the decoder (the shape's)")
    parser.add_argument("--texts", action="store_true", help="no images")
    parser.add_argument("--cases", nargs="+", default=[""], help="those whose names contain any of these")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_model(Path(scratch) / "model", replace(SHAPES[given.shape], num_layers=given.layers))
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        rank = TrainerRank(make_config(directory, int(0.95 * total)), World(0, 1, DEVICE))
        print(f"{torch.cuda.get_device_name()}, {given.shape}; whole below {rank.base.whole_below} tokens of text")
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        rank.create_model("m", Trainable(rank=RANK, seed=1))
        perturb(rank, "m")
        cases = {
            "16 groups of 1,024 + 8 x 256": groups(16, 1024, [256] * 8),
            "16 groups of 64 + 4 x 256": groups(16, 64, [256] * 4),
            "16 groups of 160 + 8 x 256": groups(16, 160, [256] * 8),  # just enough to share
            "16 groups of 256 + 8 x 256": groups(16, 256, [256] * 8),
            "one group of 1,024 + 8 x 256": groups(1, 1024, [256] * 8),
            "two groups of 256 + 4 x 64": groups(2, 256, [64] * 4),
            # Just more than a graph takes, so that launches count.
            "one group of 300 + 8 x 256": groups(1, 300, [256] * 8),
            "one group of 1,000 + 4 x 60": groups(1, 1000, [60] * 4),
            "4 groups of 5,000 + 8 x 256": groups(4, 5000, [256] * 8),
            "8 episodes of 6 turns of 400": episodes(8, 6, 400, image=False),
        }
        if not given.texts:
            cases |= {
                # As many pixels as a request may have.
                "5 groups of an image of 1,000 + 16 x 64": groups(5, 1000, [64] * 16, image=True),
                "8 episodes of 6 turns of 400 with an image in each": episodes(8, 6, 400, image=True),
            }
        for name, inputs in cases.items():
            if any(part in name for part in given.cases):
                compare(rank, name, batch_of(inputs, rank.base.renderer))
        print(f"compiled while it served: {torch._dynamo.utils.counters['stats']['unique_graphs'] - compiled}")


if __name__ == "__main__":
    main()
