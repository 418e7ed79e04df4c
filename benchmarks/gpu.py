"""The trainer on one GPU beside bare transformers + PEFT, on random weights in the shape of a published model.

    python benchmarks/gpu.py [--shape 4b] [--layers 36] [--fp8]

The trainer is one rank in this process, without server and network. MFU is a step's operations over those of a
bfloat16 product of 8192 x 8192 timed in the same run: 4 for each parameter of the decoder's linears and the head and
each token (a frozen base has no weight gradients), and 3.5 times a causal attention's. `--fp8` measures a base whose
decoder is in fp8, dequantised once and for each product, without transformers, which has no backward of it.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shapes import SHAPES, Shape, make_model
from tests.factories import cross_entropy, photo
from tests.specs import tiny_spec
from tests.trainers import forward_backward, gradients, perturb, relative_distance, together
from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.api_schemas.training import AdamParams, ForwardBackwardOutput, Trainable
from tinker_server.backends.model_spec import Mesh, ModelSpec, Placement
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

RANK = 32
DEVICE = torch.device("cuda", 0)


def make_config(source: Path, gpu_memory_bytes: int, num_ranks: int = 1) -> ModelSpec:
    """Make the spec that the server would use on such a GPU."""
    return replace(
        tiny_spec(source),
        name="bench",
        device="cuda",
        dtype="bfloat16",
        max_context_length=65536,
        max_tokens_per_microbatch=16384,
        image_cache_bytes=1 << 30,
        mesh=Mesh(replicate=num_ranks),
        placement=Placement(trainer_bytes=gpu_memory_bytes),
        shares_microbatches=True,
    )


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """Return the best of several runs, after a warm-up."""
    taken = []
    for _ in range(times + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def peak_flops() -> float:
    """Measure the operations per second of a large bfloat16 product."""
    left, right = torch.randn(2, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    return 20 * 2 * 8192**3 / seconds(lambda: [left @ right for _ in range(20)])


def text(length: int, random: np.random.Generator) -> Datum:
    ids = random.integers(0, 250, length)
    return Datum(
        model_input=ModelInput(chunks=[EncodedTextChunk(tokens=ids.astype(np.int32))]),
        loss_fn_inputs={"target_tokens": np.roll(ids, -1), "weights": np.full(length, 1e-3, np.float32)},
    )


def picture(rank: TrainerRank, seed: int) -> Datum:
    """Make a photograph of 640 x 480 between 40 tokens of text."""
    random = np.random.default_rng(seed)
    before, after = (EncodedTextChunk(tokens=random.integers(0, 250, 20, dtype=np.int32)) for _ in range(2))
    chunk = ImageChunk(data=photo(640, 480, seed, format="jpeg"), format="jpeg")
    model_input = ModelInput(chunks=[before, chunk, after])
    length, _ = rank.base.renderer.layout(model_input, "datum")
    targets: dict[str, np.ndarray] = {
        "target_tokens": random.integers(0, 250, length),
        "weights": np.full(length, 1e-3, np.float32),
    }
    return Datum(model_input=model_input, loss_fn_inputs=targets)


class Report:
    """Prints a line for each case."""

    def __init__(self, shape: Shape) -> None:
        self._peak = peak_flops()
        self._shape = shape
        name = torch.cuda.get_device_name()
        print(f"{name}, {self._peak / 1e12:.0f} TFLOP/s, {shape.num_parameters / 1e9:.2f} B parameters a token")

    def line(self, name: str, lengths: Sequence[int], work: Callable[[], object]) -> None:
        torch.cuda.reset_peak_memory_stats()
        took_s, num_tokens = seconds(work), sum(lengths)
        mfu = self._shape.flops(lengths) / took_s / self._peak
        gib = torch.cuda.max_memory_allocated() / 2**30
        print(f"{name}: {took_s * 1e3:.0f} ms, {num_tokens / took_s:.0f} tokens/s, MFU {mfu:.3f}, {gib:.1f} GiB")


def bare(directory: Path, report: Report) -> None:
    """Time transformers with PEFT's adapters and the mean loss, on the largest batch of 1,024-token rows that fits."""
    takes_images = (directory / "preprocessor_config.json").exists()
    kind = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="sdpa")
    linears = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and ".layers." in name]
    targets = [name for name in linears if "visual" not in name]
    peft = get_peft_model(model.to(DEVICE), PeftLoraConfig(r=RANK, lora_alpha=32, target_modules=targets))
    for size in (16, 8, 4, 2):
        ids = torch.randint(0, 250, (size, 1024), device=DEVICE)

        def step(ids: torch.Tensor = ids) -> None:
            peft(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        try:
            report.line(f"bare transformers + PEFT, {size} x 1024", [1024] * size, step)
        except torch.OutOfMemoryError:
            print(f"bare transformers + PEFT, {size} x 1024: out of memory")
        else:
            return


def trainer(directory: Path, report: Report, **settings: Any) -> None:
    """Time packed text, a long datum, small batches, photographs, and a step."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    config = replace(make_config(directory, int(0.95 * total)), **settings)
    began = time.perf_counter()
    rank = TrainerRank(config, World(0, 1, DEVICE))
    assert rank.base.memory is not None
    print(f"loaded and compiled in {time.perf_counter() - began:.0f} s; {rank.base.memory.describe()}")
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    rank.create_model("m", Trainable(rank=RANK, seed=1, layout="service"))
    random = np.random.default_rng(0)
    for name, lengths in (
        ("16 x 1024", [1024] * 16),
        ("ragged", random.integers(50, 900, 34).tolist()),
        ("1 x 16384", [16384]),
        ("1 x 32768", [32768]),
        ("8 x 64", [64] * 8),
    ):
        batch = cross_entropy([text(length, random) for length in lengths])
        report.line(f"trainer, {name}", lengths, partial(forward_backward, rank, "m", batch))
    for first in (1, 1001, 2001, 3001) if rank.base.renderer.takes_images else ():
        batch = cross_entropy([picture(rank, seed) for seed in range(first, first + 48)])
        new_s = seconds_once(partial(forward_backward, rank, "m", batch))
        time.sleep(1)  # until what the tower made of them has gone to the host, from where it then comes
        again_s = seconds_once(partial(forward_backward, rank, "m", batch))
        print(f"trainer, 48 photographs: {new_s:.3f} s new, {again_s:.3f} s again, {new_s / again_s:.2f} times")
    many_models(rank, report)
    print(f"optim_step: {seconds_once(lambda: rank.optim_step('m', AdamParams())) * 1e3:.0f} ms")
    print(f"compiled while it served: {torch._dynamo.utils.counters['stats']['unique_graphs'] - compiled}")


def many_models(rank: TrainerRank, report: Report) -> None:
    """Time eight models of 4 x 128 tokens each, in succession and in one microbatch, and compare the numbers."""
    random = np.random.default_rng(1)
    batches = []
    for place in range(8):
        rank.create_model(f"m{place}", Trainable(rank=8, seed=place, layout="service"))
        perturb(rank, f"m{place}")
        batches.append((f"m{place}", cross_entropy([text(128, random) for _ in range(4)])))
    lengths = [128] * 32
    report.line(
        "trainer, 8 models of 4 x 128, apart", lengths, lambda: [forward_backward(rank, *one) for one in batches]
    )
    report.line("trainer, 8 models of 4 x 128, together", lengths, lambda: together(rank, batches))
    for name, _ in batches:
        rank.models[name].clear_gradient()
    shared = together(rank, batches)
    gaps, errors = [], []
    for (name, batch), output in zip(batches, shared, strict=True):
        got = gradients(rank, name)
        rank.models[name].clear_gradient()
        alone = forward_backward(rank, name, batch)
        assert isinstance(output, ForwardBackwardOutput) and alone is not None
        for one, other in zip(output.loss_fn_outputs, alone.loss_fn_outputs, strict=True):
            gaps.append(np.abs(one["logprobs"] - other["logprobs"]))
        errors.append(relative_distance(got.values(), gradients(rank, name).values()))
        rank.delete_model(name)
    print(
        f"together against apart: log probabilities mean {np.concatenate(gaps).mean():.4f}, max"
        f" {np.concatenate(gaps).max():.3f} nats; gradients {max(errors):.4f} of their norm at most"
    )


def seconds_once(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="4b")
    parser.add_argument("--layers", type=int, help="of the decoder (the shape's)")
    parser.add_argument("--fp8", action="store_true", help="the decoder's linears")
    given = parser.parse_args()
    shape = replace(SHAPES[given.shape], num_layers=given.layers)
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_model(Path(scratch) / "model", shape, precision="fp8" if given.fp8 else None)
        torch.cuda.empty_cache()
        report = Report(shape)
        for precision in (None, "fp8") if given.fp8 else (None,):
            print(f"base {precision or 'in bfloat16'}")
            trainer(directory, report, is_quantised=given.fp8, base_precision=precision)
            gc.collect()
            torch.cuda.empty_cache()
        if not given.fp8:
            bare(directory, report)


if __name__ == "__main__":
    main()
