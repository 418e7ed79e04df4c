"""Several GPUs over one: training through the trainer's client, on a random Qwen3-VL of 4.4 billion parameters, or a
whole server through the SDK.

    python benchmarks/several_gpus.py [--layers 36] [--long] [--gpus 2]
    python benchmarks/several_gpus.py --server [--shape 4b] [--layers 36] [--gpus 8 | --cpu 2]

`--long` trains one datum of 131,072 tokens with 64 images, of which two GPUs compute a slice each. `--server` runs
`gpu_server.py` on 1, 2, 4 and 8 of the machine's GPUs in turn, each with a server of its own at its defaults, and
prints one table: batches of 64 x 1,024, 512 samples at once, RL steps of 128 groups, the deaths of a rank and of an
engine. `--cpu` rehearses this with so many ranks and engines of the tiny model.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu import RANK, make_config, text
from benchmarks.shapes import SHAPES, make_model
from tests.factories import cross_entropy, photo
from tinker_server.api_schemas.inputs import Chunk, Datum, EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import Mesh, ModelSpec
from tinker_server.backends.protocol import EncodedBatch
from tinker_server.backends.trainer.client import TrainerClient

GIB = 2**30
LONG, NUM_IMAGES = 131072, 64


Batches = dict[str, tuple[int, EncodedBatch]]
"""Tokens and data by name."""


def short_batches() -> Batches:
    """Make batches of many samples."""
    random = np.random.default_rng(0)
    found = {}
    for name, lengths in (
        ("64 x 1024", [1024] * 64),
        ("ragged", random.integers(50, 900, 96).tolist()),
        ("32 x 240", [240] * 32),
    ):
        found[name] = sum(lengths), cross_entropy([text(length, random) for length in lengths])
    return found


def long_batch(source: Path) -> Batches:
    """Make one datum of images with text between them."""
    renderer = Renderer(str(source), image_cache_bytes=1 << 30, max_image_pixels=1 << 24)
    random = np.random.default_rng(0)
    photographs: list[Chunk] = [
        ImageChunk(data=photo(1024, 1024, seed, format="jpeg"), format="jpeg") for seed in range(NUM_IMAGES)
    ]
    num_image_tokens, _ = renderer.layout(ModelInput(chunks=photographs), "datum")
    words = np.array_split(random.integers(0, 250, LONG - num_image_tokens, dtype=np.int32), NUM_IMAGES)
    chunks: list[Chunk] = []
    for photograph, tokens in zip(photographs, words, strict=True):
        chunks += [photograph, EncodedTextChunk(tokens=tokens)]
    targets: dict[str, np.ndarray] = {
        "target_tokens": random.integers(0, 250, LONG),
        "weights": np.full(LONG, 1e-3, np.float32),
    }
    print(f"{LONG} tokens, {num_image_tokens} of them of {NUM_IMAGES} images")
    return {"long": (LONG, cross_entropy([Datum(model_input=ModelInput(chunks=chunks), loss_fn_inputs=targets)]))}


async def seconds(spec: ModelSpec, batches: Batches) -> dict[str, float]:
    """Return the best of two runs, after a warm-up."""
    client, num_ranks = TrainerClient(spec), spec.mesh.size
    began = time.perf_counter()
    await client.start()
    print(f"{num_ranks} ranks started in {time.perf_counter() - began:.0f} s", flush=True)
    try:
        model = await client.create_model("m", Trainable(rank=RANK, seed=1, layout="service"), "owner")
        best = {}
        for name, (num_tokens, batch) in batches.items():
            taken = []
            for _ in range(3):
                began = time.perf_counter()
                await client.forward_backward(model, batch, backward=True)
                taken.append(time.perf_counter() - began)
            best[name] = min(taken[1:])
            gib = [(total - free) / GIB for free, total in map(torch.cuda.mem_get_info, range(num_ranks))]
            print(
                f"{num_ranks} ranks, {name}: {best[name] * 1e3:.0f} ms, {num_tokens / best[name]:.0f} tokens/s,"
                f" {max(gib):.1f} GiB of a GPU",
                flush=True,
            )
        return best
    finally:
        await client.stop()


def serve(num_gpus: int, options: Sequence[str], scratch: Path, is_cpu: bool) -> dict[str, float]:
    """Run a server on the machine's first GPUs, and return its figures by name."""
    figures = scratch / f"figures-{num_gpus}.json"
    sizes = ["--batch", "4", "--groups", "4"] if is_cpu else ["--batch", "64", "--groups", "128"]
    command = [sys.executable, str(Path(__file__).with_name("gpu_server.py")), "--once", "--rounds", "2", *sizes]
    command += ["--figures", str(figures), "--model", str(scratch / "model")]
    command += ["--cpu", str(num_gpus)] if is_cpu else []
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    visible = ",".join(seen.split(",")[:num_gpus])
    done = subprocess.run([*command, *options], env={**os.environ, "CUDA_VISIBLE_DEVICES": visible})
    if done.returncode:
        print(f"{num_gpus}: gpu_server.py ended with {done.returncode}", flush=True)
    return json.loads(figures.read_text()) if figures.exists() else {}


def show(found: Mapping[int, Mapping[str, float]]) -> None:
    """Print a row for each figure, a column for each number of GPUs, and how many times the first column each is."""
    first = next(iter(found.values()))
    print("| figure | " + " | ".join(map(str, found)) + " |\n|" + "---|" * (1 + len(found)))
    for name, least in first.items():
        cells = []
        for number, figures in found.items():
            if (value := figures.get(name)) is None:
                cells.append("-")
                continue
            ratio = least / value if name.endswith((" s", " ms")) else value / least
            is_compared = number > 1 and not name.endswith(("nats", "GiB"))
            shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            cells.append(f"{shown} ({ratio:.2f} x)" if is_compared else shown)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36, help="of the decoder (36)")
    parser.add_argument("--long", action="store_true", help="one long datum with images")
    parser.add_argument("--gpus", type=int, default=2, help="1: without two GPUs; with --server, the most of them")
    parser.add_argument("--server", action="store_true", help="a whole server through the SDK")
    parser.add_argument("--shape", default="4b", help="of the server's model (4b)")
    parser.add_argument("--cpu", type=int, metavar="RANKS", help="rehearse --server, with at most so many ranks")
    given = parser.parse_args()
    if given.server:
        options = [] if given.cpu else ["--shape", given.shape, "--layers", str(given.layers)]
        counts = [count for count in (1, 2, 4, 8) if count <= (given.cpu or given.gpus)]
        with tempfile.TemporaryDirectory() as folder:
            show({count: serve(count, options, Path(folder), bool(given.cpu)) for count in counts})
        return
    shape = replace(SHAPES["4b"], num_layers=given.layers)
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_model(Path(scratch) / "model", shape)
        torch.cuda.empty_cache()
        memory = int(0.93 * torch.cuda.get_device_properties(0).total_memory)
        spec, batches = make_config(directory, memory), long_batch(directory) if given.long else short_batches()
        if given.long:
            spec = replace(spec, max_context_length=LONG, image_cache_bytes=4 * GIB)
        one = asyncio.run(seconds(spec, batches))
        if given.gpus == 1:
            return
        two = asyncio.run(seconds(replace(spec, mesh=Mesh(replicate=2, context=2 if given.long else 1)), batches))
    for name in one:
        print(f"two GPUs over one, {name}: {one[name] / two[name]:.2f}")


if __name__ == "__main__":
    main()
