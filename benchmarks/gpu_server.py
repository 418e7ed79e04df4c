"""A whole server on the GPUs that it sees, through the SDK, as a user starts it: two starts, training, sampling, RL
steps, deaths of trainer and engine, and the GPUs' memory.

    python benchmarks/gpu_server.py [--shape 4b|8b|30b-a3b] [--layers N] [--rounds 3] [--model DIRECTORY] [--once]
        [--adapters 4] [--precision fp8|mxfp4] [--batch 16] [--groups 64] [--server "--base-copies 2 --replay-routing"]
        [--figures FILE] [--starts] [--cpu RANKS]

Random weights in the shape of a published model, LoRA of rank 32; what is not said here is at its default. MFU as in
`benchmarks/gpu.py`; its peak is that of one GPU, measured before the server starts. The second start finds the
compiled kernels of the first in its data directory; `--once` leaves it out, `--starts` all but starts and deaths.
`--model` keeps the weights for another run. `--figures` writes the figures as JSON. `--cpu` rehearses on a CPU, with
the tiny model and as many ranks and engines.
"""

import argparse
import itertools
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import tinker
import tinker.types as types
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu import RANK, peak_flops
from benchmarks.handover import saves
from benchmarks.shapes import SHAPES, Shape, make_model
from tests.factories import present
from tests.models import make_tiny_vl
from tests.servers import Server, runs
from tests.training import rl_datum
from tinker_server.backends.configure.gpus import all_gpus
from tinker_server.backends.model_spec import BasePrecision

NAME = "bench/model"
GROUP_SIZE, PROMPT, COMPLETION = 4, 64, 256
IN_FLIGHT = 4
_TOLD = re.compile(r"GiB|compil|captured|imported the|reads weights|ready after|starts, |is back")
STEP = types.AdamParams(learning_rate=1e-4)
Figures = dict[str, float]
"""Figures by their names, which end with their unit."""


def main() -> None:
    """Run all cases in succession."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="4b")
    parser.add_argument("--layers", type=int, help="of the decoder (the shape's)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model", type=Path, help="directory of the weights, made if it is not there (a temporary one)"
    )
    parser.add_argument("--adapters", type=int, default=4, help="of which samples are drawn")
    parser.add_argument("--batch", type=int, default=16, help="samples of 1,024 tokens of a forward_backward")
    parser.add_argument("--groups", type=int, default=64, help="prompts of which 4 samples are drawn at once")
    precision_help = "keep the decoder's linears in fp8, or gpt-oss's experts in mxfp4, in the files and in memory"
    parser.add_argument("--precision", choices=("fp8", "mxfp4"), help=precision_help)
    parser.add_argument("--server", default="", help="more options of the server")
    parser.add_argument("--once", action="store_true", help="without the second start")
    parser.add_argument("--starts", action="store_true", help="starts and deaths alone")
    parser.add_argument("--figures", type=Path, help="file to which the figures are written as JSON")
    parser.add_argument("--cpu", type=int, metavar="RANKS", help="rehearse with the tiny model on a CPU")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        scratch, shape = Path(folder), replace(SHAPES[given.shape], num_layers=given.layers)
        model, peak = given.model or scratch / "model", float("nan")
        if given.cpu:
            make_tiny_vl(model)
            switches = ["--device", "cpu", "--ranks", str(given.cpu), "--engines", str(given.cpu)]
        else:
            # In a process that ends: this one has no context on the GPU, for which no plan has room.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
                card, peak = other.submit(prepare, model, shape, given.precision).result()
            switches = ["--device", "cuda", *(["--base-precision", given.precision] if given.precision else [])]
            print(f"{card}, {peak / 1e12:.0f} TFLOP/s", flush=True)
        server = Server(scratch / "data", {NAME: model}, *switches, *shlex.split(given.server))
        server.patience_s = 900  # large bases take minutes
        figures: Figures = {}
        try:
            for start in ("first",) if given.once else ("first", "second"):
                if start == "second":
                    server.stop()
                figures |= first_answer(server, start)
            training = server.client().create_lora_training_client(NAME, rank=RANK).result()
            if not given.starts:
                batches = (given.batch, 1024), (1, _longest(server)), (8, 64)
                figures |= train(training, batches, partial(_part_of_peak, shape, peak), given.rounds)
                figures |= print_memory()
                times = saves(training, given.rounds)
                times.show("from trained weights to a token of them")
                figures["from trained weights to their first token, ms"] = times.median_ms()
                figures |= sample(server, training, (given.groups, given.adapters), given.rounds)
                for number in range(given.rounds):
                    figures |= rl_step(training, given.groups, number)
            figures |= recover(server, training)
        finally:
            server.stop()
            if given.figures:
                given.figures.write_text(json.dumps(figures))


def _part_of_peak(shape: Shape, peak: float, lengths: Sequence[int], took_s: float) -> float:
    return shape.flops(lengths) / took_s / peak


def _longest(server: Server) -> int:
    (served,) = server.client().get_server_capabilities().supported_models
    print(f"contexts of {served.max_context_length} tokens", flush=True)
    return min(16384, present(served.max_context_length))


def print_log(server: Server) -> None:
    """Print what the server has said of memory and of the time that its parts take, with the times of day."""
    print(*(line for line in server.log.read_text().splitlines() if _TOLD.search(line)), sep="\n", flush=True)


def prepare(model: Path, shape: Shape, precision: BasePrecision | None = None) -> tuple[str, float]:
    """Make the weights if they are not there. Return the GPU's name, and its rate of products."""
    if not (model / "config.json").exists():
        make_model(model, shape, precision=precision)
    torch.cuda.empty_cache()
    return torch.cuda.get_device_name(), peak_flops()


def first_answer(server: Server, start: str) -> Figures:
    """Start the server, and time it to the first sample of its base."""
    began = time.perf_counter()
    server.start()
    ready_s = time.perf_counter() - began
    sampling = server.client().create_sampling_client(base_model=NAME)
    sampling.sample(types.ModelInput.from_ints([1, 2, 3]), 1, types.SamplingParams(max_tokens=1)).result()
    answer_s = time.perf_counter() - began
    print(f"{start} start: ready after {ready_s:.0f} s, answer after {answer_s:.0f} s", flush=True)
    print_log(server)
    return {f"{start} start, s": answer_s}


def print_memory() -> Figures:
    """Print what all processes together have of each GPU."""
    figures: Figures = {}
    for gpu in all_gpus():
        used, total = (size / 2**30 for size in (gpu.used_bytes, gpu.total_bytes))
        print(f"GPU {gpu.index}: {used:.1f} of {total:.1f} GiB are taken", flush=True)
        figures["a GPU, GiB"] = max(figures.get("a GPU, GiB", 0.0), used)
    return figures


def sample(server: Server, training: tinker.TrainingClient, sizes: tuple[int, int], rounds: int) -> Figures:
    """Time groups of samples of the base, and of adapters in turn: one model's, each a step after the other, for a
    large base leaves room for one model in training. `sizes`: numbers of groups and of adapters."""
    num_groups, num_adapters = sizes
    adapters: list[tinker.SamplingClient] = []
    for seed in range(num_adapters):
        training.forward_backward([text(64, np.random.default_rng(seed))], "cross_entropy").result()
        training.optim_step(STEP).result()
        adapters.append(training.save_weights_and_get_sampling_client().result())
    random, params = np.random.default_rng(0), types.SamplingParams(max_tokens=COMPLETION, stop=[])

    def draw(clients: list[tinker.SamplingClient]) -> None:
        prompts = [types.ModelInput.from_ints(random.integers(1, 250, PROMPT).tolist()) for _ in range(num_groups)]
        chosen = itertools.cycle(clients)
        waiting = [next(chosen).sample(prompt, GROUP_SIZE, params) for prompt in prompts]
        assert all(len(one.tokens) == COMPLETION for future in waiting for one in future.result().sequences)

    base = server.client().create_sampling_client(base_model=NAME).result()
    figures = {}
    for name, clients in (("base", [base]), (f"{num_adapters} adapters", adapters))[: 1 + bool(adapters)]:
        rate = num_groups * GROUP_SIZE * COMPLETION / timed(partial(draw, clients), rounds)
        print(f"{num_groups * GROUP_SIZE} x {COMPLETION} samples of {name}: {rate:.0f} tokens/s", flush=True)
        figures[f"{num_groups * GROUP_SIZE} x {COMPLETION} samples of {name}, tokens/s"] = rate
    return figures


def timed(work: Callable[[], object], rounds: int) -> float:
    """Return the best of several runs, after a warm-up."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def text(length: int, random: np.random.Generator) -> types.Datum:
    ids = random.integers(0, 250, length)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids.tolist()),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.roll(ids, -1))},
    )


def train(
    training: tinker.TrainingClient,
    batches: Sequence[tuple[int, int]],
    part_of_peak: Callable[[Sequence[int], float], float],
    rounds: int,
) -> Figures:
    """Time batches, each of samples of a length, from the call to the result, and several in flight at once."""
    random, figures = np.random.default_rng(0), {}
    for count, length in batches:
        name, lengths = f"{count} x {length}", [length] * count
        data = [text(length, random) for length in lengths]

        def one(data: list[types.Datum] = data) -> None:
            training.forward_backward(data, "cross_entropy").result()

        def several(data: list[types.Datum] = data) -> None:
            waiting = [training.forward_backward(data, "cross_entropy") for _ in range(IN_FLIGHT)]
            for future in waiting:
                future.result()

        alone_s, beside_s = timed(one, rounds), timed(several, 1) / IN_FLIGHT
        for how, took_s in (("one call", alone_s), (f"{IN_FLIGHT} calls on their way, each", beside_s)):
            rate, mfu = sum(lengths) / took_s, part_of_peak(lengths, took_s)
            print(f"{name}, {how}: {1e3 * took_s:.0f} ms, {rate:.0f} tokens/s, MFU {mfu:.3f}", flush=True)
            figures[f"{name}, {how}, tokens/s"] = rate
    for number in range(2):  # the first makes the optimizer's state
        if number:
            training.forward_backward([text(64, random)], "cross_entropy").result()
        began = time.perf_counter()
        training.optim_step(STEP).result()
    step_ms = 1e3 * (time.perf_counter() - began)
    print(f"optim_step: {step_ms:.0f} ms", flush=True)
    return {**figures, "optim_step, ms": step_ms}


def rl_step(training: tinker.TrainingClient, num_groups: int, number: int) -> Figures:
    """Time groups of samples, a step by their advantages, and publishing the new weights to the sampler."""
    random = np.random.default_rng(number)
    began = time.perf_counter()
    sampling = training.save_weights_and_get_sampling_client().result()
    prompts = [random.integers(1, 250, PROMPT).tolist() for _ in range(num_groups)]
    params = types.SamplingParams(max_tokens=COMPLETION, stop=[])
    waiting = [sampling.sample(types.ModelInput.from_ints(prompt), GROUP_SIZE, params) for prompt in prompts]
    drawn = [
        (prompt, one) for prompt, future in zip(prompts, waiting, strict=True) for one in future.result().sequences
    ]
    sampled_s = time.perf_counter() - began
    data = [
        rl_datum(prompt, one, float(advantage)) for (prompt, one), advantage in zip(drawn, itertools.cycle([1, -1]))
    ]
    passed, stepped = training.forward_backward(data, "importance_sampling"), training.optim_step(STEP)
    output = passed.result()
    stepped.result()
    whole_s = time.perf_counter() - began
    gaps = np.concatenate(
        [
            np.abs(row["logprobs"].to_numpy()[PROMPT - 1 :] - np.asarray(one.logprobs))
            for row, (_, one) in zip(output.loss_fn_outputs, drawn, strict=True)
        ]
    )
    print(
        f"RL step {number}: new weights and samples {sampled_s:.2f}, training {whole_s - sampled_s:.2f}, together"
        f" {whole_s:.2f} s; trainer and sampler differ by {gaps.mean():.4f} nats on average, {gaps.max():.3f} at most",
        flush=True,
    )
    name = f"RL step of {num_groups} x {GROUP_SIZE} x {COMPLETION}"
    return {
        f"{name}, new weights and samples, s": sampled_s,
        f"{name}, training, s": whole_s - sampled_s,
        "trainer and sampler apart, nats": float(gaps.mean()),
    }


def recover(server: Server, training: tinker.TrainingClient) -> Figures:
    """Kill the trainer's process, then the engine's, and compare the scores before and after."""
    data = [text(256, np.random.default_rng(2))]
    prompt = types.ModelInput.from_ints(data[0].model_input.to_ints())
    sampling = training.save_weights_and_get_sampling_client().result()

    def trained() -> np.ndarray:
        return training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()

    def sampled() -> np.ndarray:
        return np.asarray(sampling.compute_logprobs(prompt).result()[1:])

    figures = {}
    for name, module, scores in (
        ("trainer", "trainer.process", trained),
        ("engine", "sampler.engine.process", sampled),
    ):
        before = scores()
        children = psutil.Process(server.process.pid).children(recursive=True)
        victim = next(child for child in children if runs(child, f"tinker_server.backends.{module}"))
        began = time.perf_counter()
        victim.kill()
        worst = np.abs(np.subtract(before, scores())).max()
        took_s = time.perf_counter() - began
        print(f"{name} killed: next result after {took_s:.1f} s, {worst:.2g} nats from before")
        print_log(server)
        figures[f"{name} killed, to the next result, s"] = took_s
    return figures


if __name__ == "__main__":
    main()
