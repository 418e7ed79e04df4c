"""Training through the server on the photographs of CalTech101, for the figures of the model card.

    python through_server.py demo PARQUET_DIR OUT --seeds 0 1 2
    python through_server.py all PARQUET_DIR OUT

`demo` teaches the demo's ten classes, as the demo does, with each seed. `all` teaches the 101 classes from all
3,030 train photographs, asks about all 4,517 test photographs, and swaps images between datums to see that the
loss rises. `--held-out` sets a tenth of the train photographs aside, those that the tower has not seen either, and
asks about them instead of the test photographs: for choosing settings. Needs pyarrow for `all`. OUT gets curves,
metrics and figures.json.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import tinker
from PIL import Image
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from caltech10 import Conversation, Photo, load_photos
from caltech10_demo import RANK, Plan, evaluate, mean_loss, progress_bar, train
from caltech10_report import Evaluation, Report
from data import HELD_OUT_EVERY
from local_server import local_server, while_alive

from tinker_server.embedded import DIRECTORIES, TINY_VL

SWAPPED_AT_ONCE = 100


@dataclass(frozen=True)
class Task:
    name: str
    train: list[Photo]
    test: list[Photo]


def demo_task(_: Path) -> Task:
    return Task("demo", load_photos("train"), load_photos("test"))


def whole_task(parquet_dir: Path) -> Task:
    return Task("all", *(read_parquet(parquet_dir / f"{split}-00000-of-00001.parquet") for split in ("train", "test")))


def read_parquet(path: Path) -> list[Photo]:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    names = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]["label"]["names"]
    photos = []
    for row in table.to_pylist():
        jpeg = row["image"]["bytes"]
        size = Image.open(BytesIO(jpeg)).size
        photos.append(Photo(jpeg, size, names[row["label"]].lower().replace("_", " ")))
    return photos


def held_out(task: Task) -> Task:
    """The train photographs that `train.py` held out, in place of the test photographs."""
    seen: dict[str, int] = {}
    kept: list[Photo] = []
    aside: list[Photo] = []
    for photo in task.train:
        seen[photo.label] = seen.get(photo.label, 0) + 1
        (aside if seen[photo.label] % HELD_OUT_EVERY == 0 else kept).append(photo)
    return Task(f"{task.name} held out", kept, aside)


def mean_per_class(evaluation: Evaluation) -> float:
    return statistics.mean(evaluation.correct[label] / asked for label, asked in evaluation.asked.items())


async def swapped_loss(client: tinker.TrainingClient, conversation: Conversation, photos: list[Photo]) -> list[float]:
    """Nats per answer token with each photograph's own image, and with that of one of another class."""
    chosen = random.Random(0).sample(photos, min(SWAPPED_AT_ONCE, len(photos)))
    others = [random.Random(i).choice([o for o in chosen if o.label != p.label]) for i, p in enumerate(chosen)]
    swapped = [replace(other, label=photo.label) for photo, other in zip(chosen, others, strict=True)]
    losses = []
    for shown in (chosen, swapped):
        batch = [conversation.datum(photo) for photo in shown]
        losses.append(mean_loss(batch, await client.forward(batch, "cross_entropy")))
    return losses


async def measure(base_url: str, task: Task, plan: Plan, out: Path, console: Console) -> dict[str, object]:
    conversation = Conversation(DIRECTORIES[TINY_VL])
    report = Report(out / f"{task.name.replace(' ', '-')}-{plan.seed}")
    service = tinker.ServiceClient(base_url=base_url, api_key="tml-measure")
    client = await service.create_lora_training_client(base_model=plan.model_name, rank=RANK, seed=plan.seed)
    with progress_bar(console) as progress:
        before = await evaluate(
            await client.save_weights_and_get_sampling_client(), conversation, task.test, 0, progress
        )
        report.add_evaluation(before)
        few = random.Random(0).sample(task.test, min(200, len(task.test)))
        await train(client, conversation, plan, task.train, few, report, progress)
        sampler = await client.save_weights_and_get_sampling_client()
        after = await evaluate(sampler, conversation, task.test, plan.steps, progress)
        report.add_evaluation(after)
        own, swapped = await swapped_loss(client, conversation, task.test)
    await service.close("success")
    report.draw(f"{task.name}, LoRA of rank {RANK}: {plan.steps} steps of {plan.batch_size} photographs")
    return {
        "task": task.name,
        "seed": plan.seed,
        "steps": plan.steps,
        "batch_size": plan.batch_size,
        "learning_rate": plan.learning_rate,
        "train_photographs": len(task.train),
        "test_photographs": after.count,
        "accuracy_before": round(before.accuracy, 4),
        "accuracy": round(after.accuracy, 4),
        "mean_per_class": round(mean_per_class(after), 4),
        "loss": round(own, 4),
        "loss_with_swapped_images": round(swapped, 4),
        "training_s": round(report.steps[-1].time_s, 1),
    }


async def run(options: argparse.Namespace, console: Console) -> None:
    task = {"demo": demo_task, "all": whole_task}[options.task](options.parquet_dir)
    if options.held_out:
        task = held_out(task)
    options.out.mkdir(parents=True, exist_ok=True)
    figures = []

    async def measure_all(base_url: str) -> None:
        for seed in options.seeds:
            plan = Plan(TINY_VL, options.steps, options.batch_size, options.learning_rate, seed)
            figures.append(await measure(base_url, task, plan, options.out, console))
            console.print(figures[-1])

    arguments = ["--data-dir", str(options.out / "server"), "--model", TINY_VL, "--device", options.device]
    async with local_server(arguments, options.out / "server.log", console) as server:
        await while_alive(server, measure_all(server.base_url))
    (options.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    accuracies = [float(str(one["accuracy"])) for one in figures]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    print(f"{task.name}: accuracy {statistics.mean(accuracies):.4f}, spread {spread:.4f} over {len(accuracies)} seeds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["demo", "all"])
    parser.add_argument("parquet_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--held-out", action="store_true", help="ask about a tenth of the train photographs instead")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a SIGTERM stops the server too
    asyncio.run(run(parser.parse_args(), Console()))
