"""Training on two GPUs over one, through the trainer's client, on a random Qwen3-VL of 4.4 billion parameters.

python benchmarks/several_gpus.py [--layers 36]
"""

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from api_schemas.training import Trainable
from backends.trainer.client import TrainerClient
from benchmarks.gpu import RANK, make_config, text
from benchmarks.shapes import SHAPES, make_model
from tests.factories import cross_entropy

GIB = 2**30


async def seconds(source: Path, num_ranks: int) -> dict[str, float]:
    """Return the best of two runs, after a warm-up."""
    random = np.random.default_rng(0)
    client = TrainerClient(make_config(source, 120 * GIB, num_ranks))
    began = time.perf_counter()
    await client.start()
    print(f"{num_ranks} ranks started in {time.perf_counter() - began:.0f} s", flush=True)
    try:
        await client.create_model("m", Trainable(rank=RANK, seed=1), "owner")
        best = {}
        for name, lengths in (
            ("64 x 1024", [1024] * 64),
            ("ragged", random.integers(50, 900, 96).tolist()),
            ("32 x 240", [240] * 32),
        ):
            batch = cross_entropy([text(length, random) for length in lengths])
            taken = []
            for _ in range(3):
                began = time.perf_counter()
                await client.forward_backward("m", batch, backward=True)
                taken.append(time.perf_counter() - began)
            best[name] = min(taken[1:])
            print(f"{num_ranks} ranks, {name}: {best[name] * 1e3:.0f} ms, {sum(lengths) / best[name]:.0f} tokens/s")
        return best
    finally:
        await client.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36, help="of the decoder (36)")
    shape = replace(SHAPES["4b"], num_layers=parser.parse_args().layers)
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_model(Path(scratch) / "model", shape)
        torch.cuda.empty_cache()
        one, two = (asyncio.run(seconds(directory, num_ranks)) for num_ranks in (1, 2))
    for name in one:
        print(f"two GPUs over one, {name}: {one[name] / two[name]:.2f}")


if __name__ == "__main__":
    main()
