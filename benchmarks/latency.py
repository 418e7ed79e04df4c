"""Compares round trips through the SDK with the same work done bare, on a tiny text model.

    python benchmarks/latency.py [--rounds 50]

Bare is plain transformers + PEFT + torch.optim in this process, and vLLM's AsyncLLM without a server.
The difference is the server's cost: HTTP twice, the database, the scheduler, two hops between processes.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tinker.types as types
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.models import make_tiny_text
from tests.servers import Server

LENGTH, BATCH, NEW_TOKENS, VOCAB = 64, 8, 32, 300


def p50_ms(times_s: list[float]) -> float:
    return 1e3 * statistics.median(times_s)


def bare_training(model_dir: Path, rounds: int) -> dict[str, float]:
    """Return the p50 in ms of the torch calls behind each operation, on the same packed microbatch as the server's."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_dir),
        LoraConfig(r=8, lora_alpha=32, target_modules=r".*(\.(q|k|v|o|gate|up|down)_proj|lm_head)"),
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def logprobs(batch: int) -> torch.Tensor:
        ids = torch.randint(0, VOCAB, (1, batch * LENGTH))
        positions = torch.arange(LENGTH).repeat(batch)[None]
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        return logits.gather(-1, ids[..., None]) - logits.logsumexp(-1, keepdim=True)

    def forward() -> None:
        with torch.no_grad():
            logprobs(1).numpy()

    def forward_backward() -> None:
        (-logprobs(BATCH).sum()).backward()

    def optim_step() -> None:
        torch.nn.utils.get_total_norm([p.grad for p in parameters])
        optimizer.step()
        optimizer.zero_grad()

    times: dict[str, list[float]] = {"forward 1x64": [], "forward_backward 8x64": [], "optim_step": []}
    for _ in range(rounds + 5):
        for name, work in zip(times, (forward, forward_backward, optim_step), strict=True):
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return {name: p50_ms(values[5:]) for name, values in times.items()}


async def bare_sampling(model_dir: Path, rounds: int) -> float:
    """Return the p50 in ms of one sequence of 32 tokens from AsyncLLM, with its engine in a child process."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            str(model_dir),
            dtype="float32",
            enforce_eager=True,
            max_model_len=4096,
            kv_cache_memory_bytes=256 << 20,
            enable_lora=True,
            max_lora_rank=64,
            logprobs_mode="processed_logprobs",
        )
    )
    times = []
    for number in range(rounds + 5):
        params = SamplingParams(
            max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = {"prompt_token_ids": np.random.randint(0, VOCAB, LENGTH).tolist()}
        start = time.perf_counter()
        async for _ in engine.generate(prompt, params, f"bare-{number}"):
            pass
        times.append(time.perf_counter() - start)
    engine.shutdown()
    return p50_ms(times[5:])


def through_the_sdk(server: Server, rounds: int) -> dict[str, float]:
    """Return the p50 in ms from the call to the result."""
    service = server.client()
    training = service.create_lora_training_client("bench/tiny-text", rank=8).result()
    sampling = service.create_sampling_client(base_model="bench/tiny-text").result()

    def data(batch: int) -> list[types.Datum]:
        rows = np.random.randint(0, VOCAB, (batch, LENGTH))
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(row.tolist()),
                loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(row)},
            )
            for row in rows
        ]

    prompt = types.ModelInput.from_ints(np.random.randint(0, VOCAB, LENGTH).tolist())
    params = types.SamplingParams(max_tokens=NEW_TOKENS, stop=[])
    one, eight = data(1), data(BATCH)
    # Sampling has a loop of its own: on few cores the engine's threads still spin when the next call comes.
    blocks: list[dict[str, Callable[[], object]]] = [
        {
            "forward 1x64": lambda: training.forward(one, "cross_entropy").result(),
            "forward_backward 8x64": lambda: training.forward_backward(eight, "cross_entropy").result(),
            "optim_step": lambda: training.optim_step(types.AdamParams()).result(),
        },
        {"sample 1x32": lambda: sampling.sample(prompt, 1, params).result()},
    ]
    times: dict[str, list[float]] = {name: [] for block in blocks for name in block}
    for block in blocks:
        for _ in range(rounds + 5):
            for name, operation in block.items():
                start = time.perf_counter()
                operation()
                times[name].append(time.perf_counter() - start)
    return {name: p50_ms(values[5:]) for name, values in times.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=50)
    rounds = arguments.parse_args().rounds
    os.environ.update(HF_HUB_OFFLINE="1", TORCH_COMPILE_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = make_tiny_text(Path(scratch) / "tiny-text")
        bare = bare_training(model_dir, rounds)
        bare["sample 1x32"] = asyncio.run(bare_sampling(model_dir, rounds))
        server = Server(Path(scratch) / "data", {"bench/tiny-text": model_dir}).start()
        try:
            ours = through_the_sdk(server, rounds)
        finally:
            server.stop()
    print(f"{'p50 of ' + str(rounds):<24}{'through the SDK':>16}{'bare':>10}{'overhead':>10}")
    for name, round_trip in ours.items():
        print(f"{name:<24}{round_trip:>13.1f} ms{bare[name]:>7.1f} ms{round_trip - bare[name]:>7.1f} ms")


if __name__ == "__main__":
    main()
