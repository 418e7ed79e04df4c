"""Teach a small vision-language model to name the subject of a photograph, through the public SDK alone.

Starts a server on this machine (or takes a running one), trains a LoRA adapter on 300 photographs and
samples answers about 200 held-out ones before and after.

    python examples/caltech10_demo.py
    python examples/caltech10_demo.py --keep
    python examples/caltech10_demo.py --base-url http://HOST:PORT --model-name NAME --model-dir DIRECTORY
"""

import argparse
import asyncio
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tinker
import transformers
from caltech10 import Conversation, Photo, load_photos, training_batch
from caltech10_report import Evaluation, Report, Step, evaluation_of, print_comparison, print_times
from local_server import GIB, ROOT, Needs, ServerDied, TooSmall, local_server, while_alive
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tinker import types

from tinker_server.embedded import DIRECTORIES, TINY_VL

SERVER_DATA_DIR = ROOT / ".data" / "demo"
NEEDS = Needs(memory=5 * GIB, disk=GIB)
"""Server and client with the embedded model on a CPU took 4.1 GiB of memory at their peak. The data directory has some
megabytes, compiled kernels a few hundred."""
RANK = 32
WARM_UP_STEPS = 5
ANSWER_TOKENS = 12  # more than the longest class name takes
NOTICE = (
    f"[bold]The base model is {TINY_VL}[/bold], 12 million parameters, made by this project (examples/tiny_vl). "
    "It has seen photographs like these without their names, and learned the names of 91 other things: "
    "what these ten are called, the LoRA adapter learns here."
)


@dataclass(frozen=True)
class Plan:
    """Sizes and rates of the client's requests."""

    model_name: str
    steps: int
    batch_size: int
    learning_rate: float
    seed: int

    def learning_rate_at(self, step: int) -> float:
        """A short warm-up, then linear decay."""
        warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
        return self.learning_rate * warm_up * (1 - step / self.steps)


def mean_loss(batch: list[types.Datum], output: types.ForwardBackwardOutput) -> float:
    """Return the nats per answer token, from the log probabilities that the server returns."""
    loss = weight = 0.0
    for datum, result in zip(batch, output.loss_fn_outputs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        loss -= float(np.dot(weights, result["logprobs"].to_numpy()))
        weight += float(weights.sum())
    return loss / weight


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)


async def evaluate(
    sampler: tinker.SamplingClient, conversation: Conversation, photos: list[Photo], step: int, progress: Progress
) -> Evaluation:
    """Ask about all photographs at once; the sampler batches them."""
    started = time.monotonic()
    params = types.SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, stop=[conversation.end_token])
    bar = progress.add_task(f"asking about {len(photos)} photographs", total=len(photos))

    async def answer(photo: Photo) -> str:
        response = await sampler.sample(conversation.prompt(photo), num_samples=1, sampling_params=params)
        progress.advance(bar)
        return conversation.read_answer(response.sequences[0].tokens)

    answers = await asyncio.gather(*(answer(photo) for photo in photos))
    progress.remove_task(bar)
    return evaluation_of(step, [photo.label for photo in photos], answers, time.monotonic() - started)


async def train(
    client: tinker.TrainingClient,
    conversation: Conversation,
    plan: Plan,
    photos: list[Photo],
    held_out: list[Photo],
    report: Report,
    progress: Progress,
) -> None:
    """Train. Each step is submitted before the previous one is awaited, so the server never waits for the client."""
    curve_steps = {plan.steps * quarter // 4 for quarter in (1, 2, 3)}
    started = time.monotonic()
    bar = progress.add_task("training", total=plan.steps)

    async def finish(
        step: int,
        batch: list[types.Datum],
        forward_backward: tinker.APIFuture[types.ForwardBackwardOutput],
        optim_step: tinker.APIFuture[types.OptimStepResponse],
    ) -> None:
        loss = mean_loss(batch, await forward_backward)
        await optim_step
        report.add_step(Step(step, loss, plan.learning_rate_at(step), time.monotonic() - started))
        progress.update(bar, advance=1, description=f"training, loss {loss:.3f}")

    ahead = None
    for step in range(plan.steps):
        if step in curve_steps:
            sampler = await client.save_weights_and_get_sampling_client()
            report.add_evaluation(await evaluate(sampler, conversation, held_out, step, progress))
        batch = [conversation.datum(p) for p in training_batch(photos, step, plan.batch_size, plan.seed)]
        adam = types.AdamParams(learning_rate=plan.learning_rate_at(step))
        submitted = (step, batch, client.forward_backward(batch, "cross_entropy"), client.optim_step(adam))
        if ahead is not None:
            await finish(*ahead)
        ahead = submitted
    if ahead is not None:
        await finish(*ahead)


async def teach(base_url: str, plan: Plan, conversation: Conversation, report: Report, console: Console) -> str:
    """Run the whole client side, which is the same with any server of this API. Return the path of the weights."""
    photos, held_out = load_photos("train"), load_photos("test")
    service = tinker.ServiceClient(base_url=base_url, api_key="tml-demo")
    client = await service.create_lora_training_client(base_model=plan.model_name, rank=RANK, seed=plan.seed)
    with progress_bar(console) as progress:
        untrained = await client.save_weights_and_get_sampling_client()
        before = await evaluate(untrained, conversation, held_out, 0, progress)
        report.add_evaluation(before)
        progress.print(f"before training: {before.accuracy:.2f} of {before.count} photographs named correctly")
        training_started = time.monotonic()
        await train(client, conversation, plan, photos, held_out, report, progress)
        training_s = time.monotonic() - training_started
        trained = await client.save_weights_and_get_sampling_client()
        after = await evaluate(trained, conversation, held_out, plan.steps, progress)
        report.add_evaluation(after)
    saved = await client.save_weights_for_sampler("demo")
    await service.close("success")
    report.draw(f"LoRA of rank {RANK} on {plan.model_name}: {plan.steps} steps of {plan.batch_size} photographs")
    print_comparison(console, before, after)
    print_times(
        console,
        {
            "sampling before": before.time_s,
            "training, with three evaluations": training_s,
            "sampling after": after.time_s,
        },
    )
    console.print(f"curves in {report.picture_path}, metrics in {report.metrics_path}")
    print(f"accuracy {before.accuracy:.2f} -> {after.accuracy:.2f} on {after.count} held-out photographs", flush=True)
    path: str = saved.path
    return path


def next_steps(base_url: str, path: str) -> str:
    """Say what to do with the server that goes on."""
    return f"""
The server goes on at {base_url} until Ctrl-C. Open it in a browser:
  {base_url}/
                         the run: its loss, its steps, its checkpoints
  {base_url}/samples
                         what the model answered, with the photographs
  {base_url}/playground?model_path={path}
                         a chat with the trained model: add a photograph, and ask what it shows
Next:
  docs/own-data.md       train on your own data, at this address
  docs/index.md          serve a model of your own
"""


async def run(options: argparse.Namespace, console: Console) -> None:
    if options.model_dir is None:
        console.print(NOTICE)
    model_dir: Path = (options.model_dir or DIRECTORIES[TINY_VL]).resolve()
    plan = Plan(options.model_name, options.steps, options.batch_size, options.learning_rate, options.seed)
    work = (plan, Conversation(model_dir), Report(options.output), console)
    if options.base_url:
        await teach(options.base_url, *work)
        return
    data_dir = SERVER_DATA_DIR.resolve()
    if options.model_dir is None and options.device != "cuda":
        NEEDS.require(data_dir)
    arguments = ["--data-dir", str(data_dir), "--model", f"{plan.model_name}={model_dir}", "--device", options.device]
    async with local_server(arguments, data_dir / "server.log", console) as server:
        path = await while_alive(server, teach(server.base_url, *work))
        if not options.keep:
            console.print("The same with --keep leaves the server, with its dashboard: make demo ARGS=--keep")
            return
        print(next_steps(server.base_url, path), flush=True)
        await while_alive(server, asyncio.Event().wait())


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the peak; a larger model wants less")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output", help="directory for curves and metrics")
    parser.add_argument("--keep", action="store_true", help="leave the server running at the end, until Ctrl-C")
    parser.add_argument("--base-url", help="a running server; without it one is started here")
    parser.add_argument("--model-name", default=TINY_VL, help="the base model's name on the server")
    parser.add_argument("--model-dir", type=Path, help="its directory; without it, that of the embedded model")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="for a server started here")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    console = Console()
    transformers.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a SIGTERM stops the server too
    try:
        asyncio.run(run(options, console))
    except (ServerDied, TooSmall) as refusal:
        console.print(str(refusal), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
