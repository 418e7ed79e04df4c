"""Decoding of a mixture of experts by its base and by adapters, from slots with the factors of each expert, and from
slots with those that experts share once.

    python benchmarks/expert_slots.py [--layers 12] [--sequences 64 256] [--adapters 1] [--rounds 3] [--model DIRECTORY]
        [--steps FILE]

One engine of each form after the other, on the same random weights in the shape of Qwen3-VL-30B-A3B, with LoRA of rank
32 on all projections. Prompts have 64 tokens, and each round draws all sequences at once. `load` is the time from files
to a slot, with the comparison of both. `--steps` profiles decode steps with shared factors instead, of the base, of one
adapter and of all, and writes the time of each kernel to a file.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.decode_steps import Case, OurEngine, measure_steps, profiler_config
from benchmarks.sampling import NAME, RANK, Ours, Round
from benchmarks.shapes import SHAPES, make_model
from tests.models import make_tiny_vl
from tinker_server.api_schemas.training import Layout, Trainable
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import FoundModel, describe_models
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.trainer.checkpoint_files import write_adapter, write_directory

FORMS: tuple[Layout, ...] = ("own", "service")


def make_adapter(directory: Path, renderer: Renderer, seed: int) -> Path:
    """Make a small random adapter of the decoder's layers, whose experts share factors."""
    config, generator = renderer.config.get_text_config(), torch.Generator().manual_seed(seed)
    hidden, inner, num_experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    heads, keys = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    linears = {"q_proj": (hidden, heads), "k_proj": (hidden, keys), "v_proj": (hidden, keys), "o_proj": (heads, hidden)}
    stacks = {"w1": (1, num_experts), "w3": (1, num_experts), "w2": (num_experts, 1)}
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, a: Sequence[int], b: Sequence[int]) -> None:
        tensors[f"{name}.lora_A.weight"] = torch.randn(a, generator=generator) * a[-1] ** -0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(b, generator=generator) * 0.01

    for layer in range(config.num_hidden_layers):
        prefix = f"base_model.model.model.language_model.layers.{layer}"
        for name, (inputs, outputs) in linears.items():
            add(f"{prefix}.self_attn.{name}", (RANK, inputs), (outputs, RANK))
        for name, (of_a, of_b) in stacks.items():
            inputs, outputs = (inner, hidden) if name == "w2" else (hidden, inner)
            add(f"{prefix}.mlp.experts.{name}", (of_a, RANK, inputs), (of_b, outputs, RANK))
    write_directory(directory, lambda at: write_adapter(at, tensors, Trainable(rank=RANK, seed=0), NAME), durable=False)
    return directory


async def measure(found: FoundModel, form: Layout, scratch: Path, given: argparse.Namespace) -> None:
    """Measure an engine with slots of this form."""
    spec = replace(found.spec, expert_slots=form, scratch_dir=scratch / "scratch" / form)
    slot_bytes = replace(found.size, expert_slots=form).slot_bytes(RANK)
    ours = Ours(spec)
    await ours.start()
    adapters = [make_adapter(scratch / f"{form}-{number}", found.renderer, number) for number in range(given.adapters)]
    loads = []
    for weights in adapters:
        began = time.perf_counter()
        await ours.sampler.publish(weights, "bench")
        loads.append(time.perf_counter() - began)
    print(f"{form}: slot {slot_bytes / 2**30:.3f} GiB, load {', '.join(f'{load:.2f}' for load in loads)} s", flush=True)
    for count in given.sequences:
        works = {
            name: Round(count // given.size, given.size, given.tokens, weights)
            for name, weights in (("base", [None]), ("adapters", adapters))
        }
        rates: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(given.rounds + 1):  # the first is not counted
            for name, work in works.items():
                began = time.perf_counter()
                await ours.draw(work)
                rates[name].append(work.tokens / (time.perf_counter() - began))
        base, of_adapters = (statistics.median(rates[name][1:]) for name in works)
        kept = f"{of_adapters / base:.1%} of the base"
        print(f"{form}: {count} sequences: base {base:.0f}, adapters {of_adapters:.0f} tokens/s, {kept}", flush=True)
    await ours.stop()


async def profile(found: FoundModel, scratch: Path, given: argparse.Namespace) -> None:
    """Print the parts of decode steps, and write them with all kernels."""
    ours = OurEngine(
        replace(found.spec, expert_slots="service"), profiler_config(scratch, on_gpu=found.spec.device == "cuda")
    )
    await ours.start()
    adapters = [make_adapter(scratch / f"{number}", found.renderer, number) for number in range(given.adapters)]
    numbers = sorted({0, 1, given.adapters})
    cases = [Case(sequences, adapters[:number]) for number in numbers for sequences in given.sequences]
    async for _ in measure_steps({"ours": ours}, cases, given.tokens, given.rounds, scratch):
        given.steps.write_text(json.dumps([case.figures for case in cases], default=str))
    await ours.stop()


async def run(given: argparse.Namespace, source: Path, scratch: Path) -> None:
    """Measure both forms in turn."""
    config = BackendConfig(
        models={NAME: str(source)},
        device=given.device,
        max_context_length=2048,
        max_lora_rank=32,
        models_at_once=1,
        adapter_slots=given.adapters,
        kv_cache_bytes=given.cache << 30,
        base_copies=2,  # one copy would wait for the process that holds it
        scratch_dir=scratch / "scratch",
    )
    (found,) = describe_models(config).values()
    if given.steps:
        await profile(found, scratch, given)
        return
    for form in FORMS:
        await measure(found, form, scratch, given)


def main() -> None:
    """Read the options, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of the weights, made if it is not there")
    parser.add_argument("--tiny", action="store_true", help="a tiny mixture, for a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--adapters", type=int, default=1)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--size", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=Path, metavar="FILE", help="profile decode steps instead, and write them to FILE"
    )
    parser.add_argument("--cache", type=int, default=20, help="GiB of KV cache")
    given = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        source = given.model or scratch / "model"
        if given.tiny:
            make_tiny_vl(source, moe=True)
        elif not (source / "config.json").exists():
            make_model(source, replace(SHAPES["30b-a3b"], num_layers=given.layers))
            torch.cuda.empty_cache()
        asyncio.run(run(given, source, scratch))


if __name__ == "__main__":
    main()
