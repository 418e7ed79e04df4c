"""Our sampler, through its own seam, beside bare vLLM with the same engine arguments and adapters.

    python benchmarks/sampling.py [--model DIRECTORY | --four-b] [--device auto] [--adapters 4] [--profile FILE]
    python benchmarks/sampling.py --steps [--sequences 1,16,64,256,512] [--adapters 0,1,4,8] [--figures FILE]

Both engines are up at once, and rounds alternate, so that the machine is the same for both. A round draws groups of
samples, each group from an adapter, all asked for at once. Bare vLLM is its AsyncLLM in this process, one request a
sample; ours is a process of its own behind a socket. `--profile` writes what ours spends its time on (cProfile), with
the engine in a process of its own as always. `--steps` times and profiles decode steps (`decode_steps.py`).
"""

import argparse
import asyncio
import cProfile
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.decode_steps import Case, OurEngine, engine_params, measure_steps, profiler_config
from benchmarks.shapes import SHAPES, make_model
from tests.models import make_tiny_vl
from tinker_server.api_schemas.inputs import EncodedTextChunk, ModelInput
from tinker_server.api_schemas.sampling import SamplingParams
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.create import LocalModel, make_models
from tinker_server.backends.configure.describe import describe_models
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.protocol import SamplingTask
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.checkpoint_files import write_adapter, write_directory

NAME, RANK = "bench/model", 32
SEQUENCES, ADAPTERS = [1, 16, 64, 256, 512], [0, 1, 4, 8]
"""Of the cases whose steps are measured."""
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(directory: Path, model: LocalModel, seed: int) -> Path:
    """Make a small random adapter on every linear of the decoder's layers."""
    config, generator = model.renderer.config.get_text_config(), torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    sizes = {name: (hidden, inner) for name in LINEARS}
    sizes |= {"q_proj": (hidden, heads), "o_proj": (heads, hidden), "down_proj": (inner, hidden)}
    sizes |= {name: (hidden, kv) for name in ("k_proj", "v_proj")}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, (inputs, outputs) in sizes.items():
            room = "self_attn" if name in LINEARS[:4] else "mlp"
            of = f"base_model.model.model.language_model.layers.{layer}.{room}.{name}"
            tensors[f"{of}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * inputs**-0.5
            tensors[f"{of}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.01
    write_directory(directory, lambda at: write_adapter(at, tensors, Trainable(rank=RANK, seed=0), NAME), durable=False)
    return directory


class Round:
    """The samples of one round: `groups` prompts, each `size` times."""

    def __init__(self, groups: int, size: int, num_tokens: int, adapters: Sequence[Path | None]) -> None:
        random = np.random.default_rng(0)
        self.size, self.num_tokens, self.adapters = size, num_tokens, adapters
        self.prompts = [random.integers(1, 250, 64, dtype=np.int32) for _ in range(groups)]
        self.tokens = groups * size * num_tokens

    def adapter(self, group: int) -> Path | None:
        return self.adapters[group % len(self.adapters)]


class Bare:
    """vLLM's AsyncLLM in this process."""

    def __init__(self, config: ModelSpec, model: LocalModel, profiler: Any = None) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.async_llm import AsyncLLM

        from tinker_server.backends.sampler.engine.engine import engine_args

        self._needs_patches = config.device == "cpu"
        arguments = engine_args(config, model.renderer.family.vision)
        if not self._needs_patches:  # nothing of ours is inside, and graphs are those by which it then decodes fastest
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            arguments = replace(arguments, worker_cls="auto", compilation_config=graphs)
        if profiler is not None:
            arguments = replace(arguments, profiler_config=profiler)
        self.engine = AsyncLLM.from_engine_args(arguments)
        self._request = LoRARequest
        self._adapters: dict[Path, LoRARequest] = {}
        self._count = 0

    async def start(self) -> None:
        """Start the engine. On CPU both sides have our LoRA kernels: vLLM's are slow, and wrong in mixed batches."""
        if self._needs_patches:
            await self.engine.collective_rpc("patch_runner", args=([],))

    async def adapter(self, weights: Path) -> Any:
        """Return the engine's name for an adapter."""
        number = len(self._adapters) + 1
        return self._adapters.setdefault(weights, self._request(weights.name, number, str(weights)))

    async def draw(self, work: Round) -> None:
        """Sample in the bare engine's fastest way: one request per sample, outputs at the end, flat logprobs."""
        params = engine_params(work.num_tokens)

        async def one(group: int) -> None:
            self._count += 1
            weights = work.adapter(group)
            assert weights is not None
            adapter = await self.adapter(weights)
            prompt = {"prompt_token_ids": work.prompts[group].tolist()}
            async for _ in self.engine.generate(prompt, params.clone(), f"{self._count}", lora_request=adapter):
                pass

        await asyncio.gather(*(one(group) for group in range(len(work.prompts)) for _ in range(work.size)))

    async def stop(self) -> None:
        self.engine.shutdown()


class Ours:
    """`protocol.Sampler`: a child process and its engine, of which no trainer's scores are asked."""

    def __init__(self, spec: ModelSpec) -> None:
        self.sampler = SamplerPool(spec)

    async def start(self) -> None:
        """Start the engine."""
        await self.sampler.start()

    async def draw(self, work: Round) -> None:
        await asyncio.gather(*(self.sampler.sample(task) for task in tasks(work)))

    async def stop(self) -> None:
        await self.sampler.stop()


def tasks(work: Round) -> list[SamplingTask]:
    return [
        SamplingTask(
            prompt=ModelInput(chunks=[EncodedTextChunk(tokens=prompt)]),
            params=SamplingParams(max_tokens=work.num_tokens, stop=[]),
            num_samples=work.size,
            weights=work.adapter(group),
            owner="bench",
        )
        for group, prompt in enumerate(work.prompts)
    ]


async def compare(bare: Bare, ours: Ours, work: Round, rounds: int) -> None:
    rates: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(rounds + 1):
        for name, side in (("bare", bare), ("ours", ours)):
            began = time.perf_counter()
            await side.draw(work)
            rates[name].append(work.tokens / (time.perf_counter() - began))
    ratios = [mine / theirs for mine, theirs in zip(rates["ours"][1:], rates["bare"][1:], strict=True)]
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found[1:]):.0f} tokens/s (best {max(found[1:]):.0f})")
    print(f"ours over bare, median of {rounds} rounds: {statistics.median(ratios):.3f}")


async def profiled(config: ModelSpec, work: Round, rounds: int, file: Path) -> None:
    """Run our process's part in this process, where it can be profiled."""
    from tinker_server.backends.sampler.engine.process import SamplerProcess

    process = await SamplerProcess.start(config)
    await asyncio.gather(*(process.sample(task) for task in tasks(work)))
    with cProfile.Profile() as profile:
        for _ in range(rounds):
            await asyncio.gather(*(process.sample(task) for task in tasks(work)))
    profile.dump_stats(file)
    process._engine.shutdown()


async def explain_steps(given: argparse.Namespace, model: LocalModel, adapters: Sequence[Path], traces: Path) -> None:
    """Measure the steps of all cases; of those with fewer sequences than adapters none, as they use no more."""
    info = model.info
    if max(given.adapters) > info.adapter_slots:
        raise SystemExit(f"--adapters: the engines have {info.adapter_slots} slots")
    pairs = [(sequences, number) for number in given.adapters for sequences in given.sequences if sequences >= number]
    cases = [Case(sequences, adapters[:number]) for sequences, number in pairs]
    profiler = profiler_config(traces, on_gpu=info.device == "cuda")
    ours = OurEngine(info, profiler)
    await ours.start()
    bare = Bare(info, model, profiler)
    await bare.start()
    async for _ in measure_steps({"ours": ours, "bare": bare}, cases, given.tokens, given.rounds, traces):
        if given.figures is not None:
            figures = {
                "model": model.spec.source,
                "slots": info.adapter_slots,
                "cases": [case.figures for case in cases],
            }
            given.figures.write_text(json.dumps(figures, indent=1))
    await ours.stop()
    await bare.stop()


async def run(given: argparse.Namespace, source: Path, scratch: Path) -> None:
    config = BackendConfig(
        models={NAME: str(source)},
        device=given.device,
        max_context_length=2048,
        kv_cache_bytes=16 << 30 if on_gpu(given) else 1 << 30,
        base_copies=2,  # one copy would wait for the process that holds it, and bare vLLM reads its own
        max_concurrent_samples=max(256, *given.sequences) if given.steps else None,
        scratch_dir=scratch / "scratch",
    )
    model = make_models(describe_models(config))[NAME]
    adapters = [make_adapter(scratch / f"adapter-{i}", model, i) for i in range(max(given.adapters))]
    if given.steps:
        await explain_steps(given, model, adapters, scratch / "traces")
        return
    work = Round(given.groups, given.size, given.tokens, adapters)
    if given.profile is not None:
        await profiled(model.info, work, given.rounds, given.profile)
        return
    ours = Ours(model.spec)
    await ours.start()
    bare = Bare(model.info, model)
    await bare.start()
    await compare(bare, ours, work, given.rounds)
    await ours.stop()
    await bare.stop()


def on_gpu(given: argparse.Namespace) -> bool:
    return bool(torch.cuda.device_count()) and given.device != "cpu"


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--four-b", action="store_true", help="a random Qwen3-VL of 4.4 billion parameters, on a GPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--adapters", type=numbers, help="4; with --steps a list")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--size", type=int, default=4, help="samples of a group")
    parser.add_argument("--tokens", type=int, help="256; with --steps 96")
    parser.add_argument("--rounds", type=int, help="5; with --steps 2")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--steps", action="store_true", help="where the time of decode steps goes, case by case")
    parser.add_argument("--sequences", type=numbers, default=SEQUENCES, help="of the cases of --steps")
    parser.add_argument("--figures", type=Path, help="JSON of all that --steps finds")
    given = parser.parse_args()
    tokens, rounds, adapters = (96, 2, ADAPTERS) if given.steps else (256, 5, [4])
    given.tokens, given.rounds = given.tokens or tokens, given.rounds or rounds
    given.adapters = given.adapters or adapters
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    if on_gpu(given):
        os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_USE_FLASHINFER_SAMPLER="0")
    else:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1")
    if given.steps:  # both engines are begun by this process, which can have one of them inside at most
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="spawn")
        os.environ["TEARDOWN_CUPTI"] = "0"  # graphs outlive a profile, and the next profile needs them recorded too
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        source = given.model
        if given.four_b:
            source = make_model(scratch / "model", SHAPES["4b"])
            torch.cuda.empty_cache()
        elif source is None:
            source = make_tiny_vl(scratch / "model")
        asyncio.run(run(given, source, scratch))


if __name__ == "__main__":
    main()
