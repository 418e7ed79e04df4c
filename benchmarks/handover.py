"""Time from a trained model to the first token of its new weights, through the SDK and part by part, on CPU or CUDA.

    python benchmarks/handover.py [--model DIRECTORY] [--device auto] [--rank 32] [--rounds 5]

Without a directory it takes the tiny model; on a GPU `--four-b` makes a random Qwen3-VL of 4.4 billion parameters.
"""

import argparse
import asyncio
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import tinker
import tinker.types as types

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shapes import SHAPES, make_model
from tests.factories import cross_entropy, datum, prompt, words
from tests.models import make_tiny_vl
from tests.servers import Server
from tinker_server.api_schemas.inputs import EncodedTextChunk, ModelInput
from tinker_server.api_schemas.sampling import SamplingParams
from tinker_server.api_schemas.training import AdamParams, Trainable
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.create import LocalBackend
from tinker_server.backends.protocol import ADAPTER_FILE, SamplingTask

NAME = "bench/model"
IDS = np.arange(1, 65, dtype=np.int32)


class Times:
    """Time of each part in each round."""

    def __init__(self) -> None:
        self._parts: dict[str, list[float]] = defaultdict(list)
        self._since = time.perf_counter()

    def begin(self) -> None:
        self._since = time.perf_counter()

    def end(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part].append(now - self._since)
        self._since = now

    def median_ms(self) -> float:
        """Return the median of whole rounds after the first."""
        rounds = [sum(parts) for parts in zip(*self._parts.values(), strict=True)]
        median_s: float = statistics.median(rounds[1:])
        return 1e3 * median_s

    def show(self, title: str) -> None:
        print(f"{title}: ms, median of {len(next(iter(self._parts.values()))) - 1} after the first; the first")
        for part, (first, *rest) in self._parts.items():
            print(f"  {part:<48}{1e3 * statistics.median(rest):>8.1f}{1e3 * first:>10.1f}")
        first_ms = 1e3 * sum(first for first, *_ in self._parts.values())
        print(f"  {'together':<48}{self.median_ms():>8.1f}{first_ms:>10.1f}")


async def by_parts(config: BackendConfig, rank: int, rounds: int) -> None:
    """Time trainer and sampler without a server."""
    backend, times = LocalBackend(config), Times()
    await backend.start()
    try:
        base = backend.models[NAME]
        model = await base.trainer.create_model("m", Trainable(rank=rank, seed=1, layout="service"), "owner")
        batch = cross_entropy([datum(prompt(words(64)), base.renderer)])
        for number in range(rounds + 1):
            await base.trainer.forward_backward(model, batch, backward=True)
            await base.trainer.optim_step(model, AdamParams(learning_rate=1e-4))
            directory = config.scratch_dir / f"saved-{number}"
            task = SamplingTask(
                prompt=ModelInput(chunks=[EncodedTextChunk(tokens=IDS)]),
                params=SamplingParams(max_tokens=1),
                num_samples=1,
                weights=directory,
                owner="bench",
            )
            times.begin()
            await base.trainer.save(model, directory, "sampler")
            times.end("the trainer scores the canary and writes")
            await base.sampler.publish(directory, "bench")
            times.end("the engine loads and scores the canary")
            await base.sampler.sample(task)
            times.end("first token")
    finally:
        await backend.stop()
    times.show(f"by parts, {(directory / ADAPTER_FILE).stat().st_size / 1e6:.0f} MB")


def saves(training: tinker.TrainingClient, rounds: int) -> Times:
    """Time save_weights_and_get_sampling_client after a step, then a sample of one token."""
    times = Times()
    given, one_token = types.ModelInput.from_ints(IDS.tolist()), types.SamplingParams(max_tokens=1)
    target = types.TensorData.from_numpy(IDS.astype(np.int64))
    data = [types.Datum(model_input=given, loss_fn_inputs={"target_tokens": target})]
    for _ in range(rounds + 1):
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        times.begin()
        sampling = training.save_weights_and_get_sampling_client().result()
        times.end("save_weights_and_get_sampling_client")
        sampling.sample(given, 1, one_token).result()
        times.end("first token")
    return times


def through_the_sdk(config: BackendConfig, rank: int, rounds: int, scratch: Path) -> None:
    """Time the whole through a server of its own."""
    server = Server(scratch / "data", {NAME: Path(config.models[NAME])}, "--device", config.device).start()
    try:
        times = saves(server.client().create_lora_training_client(NAME, rank=rank).result(), rounds)
    finally:
        server.stop()
    times.show("through the SDK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--four-b", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("parts", "sdk"))
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model = given.model
        if given.four_b:
            model = make_model(scratch / "model", SHAPES["4b"])
        elif model is None:
            model = make_tiny_vl(scratch / "model")
        config = BackendConfig(
            models={NAME: str(model)}, device=given.device, max_lora_rank=64, scratch_dir=scratch / "scratch"
        )
        if given.only != "sdk":
            asyncio.run(by_parts(config, given.rank, given.rounds))
        if given.only != "parts":
            through_the_sdk(config, given.rank, given.rounds, scratch)


if __name__ == "__main__":
    main()
