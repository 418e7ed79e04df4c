"""The trainer on one GPU beside bare transformers + PEFT, on a random Qwen3-VL of 4.4 billion parameters.

    python benchmarks/gpu.py [--layers 36]

The trainer is one rank in this process, without server and network. MFU is a step's operations over those of a
bfloat16 product of 8192 x 8192 timed in the same run: 4 for each parameter of the decoder's linears and the head and
each token (a frozen base has no weight gradients), and 3.5 times a causal attention's.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import (
    AutoModelForImageTextToText,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from api_schemas.inputs import Datum, EncodedTextChunk, ImageChunk, ModelInput
from api_schemas.training import AdamParams, ForwardBackwardOutput, Trainable
from backends.model_spec import Mesh, ModelSpec, Placement
from backends.trainer.distributed import World
from backends.trainer.rank import TrainerRank
from tests.factories import cross_entropy, photo
from tests.models import make_tiny_vl, transpose_experts
from tests.specs import tiny_spec
from tests.trainers import forward_backward, gradients, perturb, relative_distance, together

HEADS, HEAD_SIZE, VOCAB, RANK = 32, 128, 151936, 32
CONTEXT = 65536
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Shape:
    """Shape of a Qwen3-VL; the number of query heads is the same in all of them."""

    hidden: int
    inner: int
    """Width of an expert in a mixture of experts."""
    vision: dict[str, Any]
    tied: bool
    num_layers: int = 36
    key_heads: int = 8
    experts: int = 0
    """Number of experts per layer; 0 in a dense model."""
    experts_per_token: int = 1

    @property
    def num_parameters(self) -> int:
        """Count the parameters of the linears that a token of text passes, with the head."""
        attention = self.hidden * HEAD_SIZE * (2 * HEADS + 2 * self.key_heads)
        mlp = 3 * self.hidden * self.inner * self.experts_per_token
        return self.num_layers * (attention + mlp) + self.hidden * VOCAB

    def flops(self, lengths: Sequence[int]) -> float:
        """Count the operations of forward and backward of samples, as defined above."""
        attention = 3.5 * sum(2 * n * n * HEADS * HEAD_SIZE * self.num_layers for n in lengths)
        return 4 * self.num_parameters * sum(lengths) + attention


SHAPES = {
    "4b": Shape(
        hidden=2560,
        inner=9728,
        vision={
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        tied=True,
    ),
    "8b": Shape(
        hidden=4096,
        inner=12288,
        vision={
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        tied=False,
    ),
}
SHAPES["30b-a3b"] = replace(
    SHAPES["8b"], hidden=2048, inner=768, num_layers=48, key_heads=4, experts=128, experts_per_token=8
)


def make_model(directory: Path, shape: Shape) -> Path:
    """Make random weights in the shape of a Qwen3-VL, with the tiny model's tokenizer and processor."""
    make_tiny_vl(directory)
    tiny = Qwen3VLConfig.from_pretrained(directory)
    text = {
        "vocab_size": VOCAB,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": shape.key_heads,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": tiny.text_config.eos_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    vision = {**shape.vision, "out_hidden_size": shape.hidden, "num_position_embeddings": 2304}
    ids = {
        f"{name}_token_id": getattr(tiny, f"{name}_token_id")
        for name in ("image", "video", "vision_start", "vision_end")
    }
    kind, config_kind = Qwen3VLForConditionalGeneration, Qwen3VLConfig
    if shape.experts:
        kind, config_kind = Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig
        text |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.inner,
            "norm_topk_prob": True,
        }
    config = config_kind(text_config=text, vision_config=vision, tie_word_embeddings=shape.tied, **ids)
    config.architectures = [kind.__name__]
    with DEVICE:
        model = kind(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                inputs = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
                parameter.normal_(0, inputs**-0.5)
    model.save_pretrained(directory)
    if shape.experts:
        transpose_experts(directory)
    return directory


def make_config(source: Path, gpu_memory_bytes: int, num_ranks: int = 1) -> ModelSpec:
    """Make the spec that the server would use on such a GPU."""
    return replace(
        tiny_spec(source),
        name="bench",
        device="cuda",
        dtype="bfloat16",
        max_context_length=CONTEXT,
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
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="sdpa")
    targets = r".*language_model\.layers.*_proj"
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


def trainer(directory: Path, report: Report) -> None:
    """Time packed text, a long datum, small batches, photographs, and a step."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    config = make_config(directory, int(0.95 * total))
    began = time.perf_counter()
    rank = TrainerRank(config, World(0, 1, DEVICE))
    assert rank.base.memory is not None
    print(f"loaded and compiled in {time.perf_counter() - began:.0f} s; {rank.base.memory.describe()}")
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    rank.create_model("m", Trainable(rank=RANK, seed=1))
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
    for first in (1, 1001, 2001, 3001):
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
        rank.create_model(f"m{place}", Trainable(rank=8, seed=place))
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
    parser.add_argument("--layers", type=int, default=36, help="of the decoder (36)")
    shape = replace(SHAPES["4b"], num_layers=parser.parse_args().layers)
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_model(Path(scratch) / "model", shape)
        torch.cuda.empty_cache()
        report = Report(shape)
        trainer(directory, report)
        torch.cuda.empty_cache()
        bare(directory, report)


if __name__ == "__main__":
    main()
