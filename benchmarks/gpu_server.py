"""A whole server on one GPU, through the SDK, as a user starts it: training, an RL step, a death of the trainer.

    python benchmarks/gpu_server.py [--shape 4b|8b|30b-a3b] [--layers N] [--rounds 3] [--replay-routing]

Random weights in the shape of a Qwen3-VL, LoRA of rank 32; what is not said here is at its default. MFU as in
`benchmarks/gpu.py`; its peak is measured before the server starts.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import tinker
import tinker.types as types
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu import RANK, SHAPES, Shape, make_model, peak_flops
from benchmarks.handover import saves
from tests.servers import Server
from tests.training import rl_datum

NAME = "bench/model"
GROUPS, GROUP_SIZE, PROMPT, COMPLETION = 64, 4, 64, 256
IN_FLIGHT = 4
STEP = types.AdamParams(learning_rate=1e-4)


def main() -> None:
    """Run all cases in succession."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="4b")
    parser.add_argument("--layers", type=int, help="of the decoder (the shape's)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replay-routing", action="store_true", help="as the server's switch, of a mixture")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        scratch, shape = Path(folder), SHAPES[given.shape]
        shape = replace(shape, num_layers=given.layers or shape.num_layers)
        peak = peak_flops()
        model = make_model(scratch / "model", shape)
        torch.cuda.empty_cache()
        began = time.perf_counter()
        switches = ["--replay-routing"] if given.replay_routing else []
        server = Server(scratch / "data", {NAME: model}, "--device", "cuda", *switches).start()
        try:
            name = torch.cuda.get_device_name()
            print(f"{name}, {peak / 1e12:.0f} TFLOP/s; ready after {time.perf_counter() - began:.0f} s", flush=True)
            training = server.client().create_lora_training_client(NAME, rank=RANK).result()
            train(training, shape, peak, given.rounds)
            saves(training, given.rounds).show("from trained weights to a token of them")
            for number in range(given.rounds):
                rl_step(training, number)
            recover(server, training)
        finally:
            server.stop()
            print(*(line for line in server.log.read_text().splitlines() if "GiB" in line), sep="\n")


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


def train(training: tinker.TrainingClient, shape: Shape, peak: float, rounds: int) -> None:
    """Time batches from the call to the result, and several in flight at once."""
    random = np.random.default_rng(0)
    for name, lengths in (("16 x 1024", [1024] * 16), ("1 x 16384", [16384]), ("8 x 64", [64] * 8)):
        data = [text(length, random) for length in lengths]

        def one(data: list[types.Datum] = data) -> None:
            training.forward_backward(data, "cross_entropy").result()

        def several(data: list[types.Datum] = data) -> None:
            waiting = [training.forward_backward(data, "cross_entropy") for _ in range(IN_FLIGHT)]
            for future in waiting:
                future.result()

        alone_s, beside_s = timed(one, rounds), timed(several, 1) / IN_FLIGHT
        for how, took_s in (("one call", alone_s), (f"{IN_FLIGHT} calls on their way, each", beside_s)):
            rate, mfu = sum(lengths) / took_s, shape.flops(lengths) / took_s / peak
            print(f"{name}, {how}: {1e3 * took_s:.0f} ms, {rate:.0f} tokens/s, MFU {mfu:.3f}", flush=True)
    for number in range(2):  # the first makes the optimizer's state
        if number:
            training.forward_backward([text(64, random)], "cross_entropy").result()
        began = time.perf_counter()
        training.optim_step(STEP).result()
    print(f"optim_step: {1e3 * (time.perf_counter() - began):.0f} ms", flush=True)


def rl_step(training: tinker.TrainingClient, number: int) -> None:
    """Time groups of samples, a step by their advantages, and publishing the new weights to the sampler."""
    random = np.random.default_rng(number)
    began = time.perf_counter()
    sampling = training.save_weights_and_get_sampling_client().result()
    prompts = [random.integers(1, 250, PROMPT).tolist() for _ in range(GROUPS)]
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


def recover(server: Server, training: tinker.TrainingClient) -> None:
    """Kill the trainer's process, and compare the scores before and after."""
    data = [text(256, np.random.default_rng(2))]
    before = training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    children = psutil.Process(server.process.pid).children(recursive=True)
    victim = next(child for child in children if child.cmdline()[1:3] == ["-m", "backends.trainer.process"])
    began = time.perf_counter()
    victim.kill()
    after = training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    worst = np.abs(np.subtract(before, after)).max()
    print(f"trainer killed: next result after {time.perf_counter() - began:.1f} s, {worst:.2g} nats from before")


if __name__ == "__main__":
    main()
