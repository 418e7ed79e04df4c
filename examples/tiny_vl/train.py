"""Train the small vision-language model: distil its vision tower, then teach its language model captions.

    python train.py --data .tiny --out OUT --distil-minutes 15 --caption-minutes 2.5

DATA holds train.zip, test.zip, teacher.pt and tokenizer/ (README.md says how they are made). Stage 1 shows teacher and
student the same random crops of the train photographs, without labels. Stage 2 leaves the tower alone: the language
model learns to name the 91 classes outside the demo's ten, and to carry the teacher's features to where a name begins.
Test photographs are only counted in the log. `--resume DIR` goes on from an earlier OUT.
"""

# mypy: disable-error-code="no-any-return"
# mypy takes every attribute of a torch module for a Tensor or a Module.

import argparse
import csv
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from augment import CAPTION, DISTIL, WHOLE, Strength
from conversation import IGNORED, Tokens, last_states, recipe_form, varied_form
from data import DEMO_CLASSES, Canvases, Photos, load_canvases, load_photos
from distil import (
    STATISTICS_BATCHES,
    WHOLE_SHARE,
    Distillation,
    View,
    ViewPool,
    common_grids,
    make_view,
    pooled_features,
)
from model import make_model, write_model
from optim import Clock, Optimizer
from probe import linear_probe
from safetensors.torch import load_file, save_file
from teacher import Teacher, load_teacher
from torch.nn import functional as F
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from vision import BatchedVision

LABEL_SMOOTHING = 0.05
REPEAT_SHARE = 0.1
ANSWER_WEIGHT = 1.0  # of telling the teacher's features where the name of the subject begins
PROBE_BATCH = 512
LEAST_MINUTES_TO_TRY = 5
CONVOLUTIONS_TRIED = 3  # algorithms for each shape of the teacher's; trying more takes longer than it saves
HEAD_FILE = "distillation_head.safetensors"
Losses = dict[str, torch.Tensor]
LOG_COLUMNS = (
    "stage",
    "seconds",
    "step",
    "images",
    "images_per_s",
    "loss",
    "token",
    "pooled",
    "logit",
    "caption",
    "repeat",
    "answer",
    "probe",
)


class Log:
    """Rows of train.csv; means over the steps since the row before. Reading losses waits for the device: rarely."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, LOG_COLUMNS)
        self._writer.writeheader()
        self._sums: dict[str, torch.Tensor] = {}
        self._steps = 0
        self._images = 0
        self._since = time.monotonic()

    def add(self, losses: dict[str, torch.Tensor], images: int) -> None:
        for name, value in losses.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach()
        self._steps += 1
        self._images += images

    def row(self, stage: str, clock: Clock, step: int, images: int, probe: float | None = None) -> None:
        means = {name: round(float(total) / self._steps, 4) for name, total in self._sums.items()}
        speed = round(self._images / (time.monotonic() - self._since))
        row = {"stage": stage, "seconds": round(clock.elapsed(), 1), "step": step, "images": images} | means
        row |= {"images_per_s": speed, "probe": "" if probe is None else round(probe, 4)}
        self._writer.writerow(row)
        self._file.flush()
        print(" ".join(f"{name}={value}" for name, value in row.items() if value != ""), flush=True)
        self.restart()

    def restart(self) -> None:
        self._sums, self._steps, self._images, self._since = {}, 0, 0, time.monotonic()


@dataclass(frozen=True)
class ProbeSet:
    train: Canvases
    train_labels: torch.Tensor
    test: Canvases
    test_labels: torch.Tensor

    def accuracy(self, vision: BatchedVision, teacher: Teacher | None, batch: int) -> float:
        train_x, test_x = (pooled_features(vision, teacher, part, batch) for part in (self.train, self.test))
        return linear_probe(train_x, self.train_labels, test_x, self.test_labels).overall


@dataclass(frozen=True)
class Run:
    args: argparse.Namespace
    device: torch.device
    model: Qwen3VLForConditionalGeneration
    teacher: Teacher
    distillation: Distillation
    photos: Photos
    canvases: Canvases
    probes: ProbeSet | None
    log: Log

    def vision(self, compiled: bool) -> BatchedVision:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return BatchedVision(self.model.model.visual, dtype, compiled and self.device.type == "cuda")

    def probe(self, teacher: Teacher | None = None) -> float | None:
        if self.probes is None:
            return None
        return self.probes.accuracy(self.vision(compiled=False), teacher, PROBE_BATCH)

    def view_maker(self, batch: int, strengths: list[Strength], shares: list[float]) -> Callable[[], View]:
        """Makes views of random photographs, all of one random grid and strength."""
        grids, frequencies = common_grids(self.canvases)

        def make() -> View:
            indices = torch.randint(len(self.photos.labels), (batch,))
            grid, strength = random.choices(grids, frequencies)[0], random.choices(strengths, shares)[0]
            return make_view(self.teacher, self.canvases, indices, grid, strength)

        return make

    def save(self) -> int:
        """Write the model as it is now; return the size of its directory in bytes."""
        head = {name: tensor.cpu().contiguous() for name, tensor in self.distillation.state_dict().items()}
        save_file(head, self.args.out / HEAD_FILE)
        return write_model(self.model, self.args.data / "tokenizer", self.args.out / "model")


def train(run: Run, stage: str, minutes: float, batch: int, optimizer: Optimizer, losses: Callable[[], Losses]) -> None:
    """Step by the `loss` among `losses()` until the time is over; log, probe and save on the way."""
    clock, step, probed = Clock(minutes), 0, 0
    run.log.restart()
    while clock.progress() < 1:
        found = losses()
        found["loss"].backward()
        optimizer.step(clock.progress())
        step += 1
        run.log.add(found, batch)
        over = clock.progress() == 1
        if over or clock.elapsed() > (probed + 1) * run.args.probe_every:
            probed += 1
            run.save()
            run.log.row(stage, clock, step, step * batch, run.probe())
        elif step % run.args.log_every == 0:
            run.log.row(stage, clock, step, step * batch)


def distil(run: Run) -> None:
    args, visual = run.args, run.model.model.visual
    make = run.view_maker(args.batch, [WHOLE, DISTIL], [WHOLE_SHARE, 1 - WHOLE_SHARE])
    if args.resume is None:
        run.distillation.measure([make() for _ in range(args.statistics_batches)])
    pool, vision = ViewPool(make, args.pool, args.uses), run.vision(compiled=True)
    for merger in visual.deepstack_merger_list:  # not seen by this loss: it would only decay
        merger.requires_grad_(False)
    trained = [visual.patch_embed, visual.pos_embed, visual.blocks, visual.merger, run.distillation.head]

    def losses() -> Losses:
        seen = pool.draw()
        return run.distillation(vision(seen.pixels_B3HW), seen)

    train(run, "distil", args.distil_minutes, args.batch, Optimizer(trained, args.distil_rate, args.decay_from), losses)


def tune_captions(run: Run, tokens: Tokens) -> None:
    """The language model learns to read the tower, which stays as it is."""
    args, model, visual = run.args, run.model, run.model.model.visual
    visual.requires_grad_(False)
    visual.deepstack_merger_list.requires_grad_(True)
    vision = run.vision(compiled=True)
    pool = ViewPool(run.view_maker(args.caption_batch, [CAPTION], [1]), args.pool, args.uses)
    names = [run.photos.names[label] for label in run.photos.labels]
    image_start = len(tokens.before_image)
    trained = [model.model.language_model, model.lm_head, visual.deepstack_merger_list, run.distillation.answer_head]

    def cross_entropy(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows, columns = (targets != IGNORED).nonzero(as_tuple=True)
        said = model.lm_head(states[rows.to(run.device), columns.to(run.device)]).float()
        return F.cross_entropy(said, targets[rows, columns].to(run.device), label_smoothing=LABEL_SMOOTHING)

    def losses() -> Losses:
        seen = pool.draw()
        spoken = [
            recipe_form(None) if names[i] in DEMO_CLASSES else varied_form(names[i]) for i in seen.photos_B.tolist()
        ]
        grids = [seen.grid] * len(spoken)
        inputs, targets = tokens.about_images(spoken, grids)
        repeated, repeat_targets = tokens.repetitions(round(args.caption_batch * REPEAT_SHARE))
        name_starts = tokens.name_starts(spoken, grids).to(run.device)
        images = vision(seen.pixels_B3HW).flat()
        with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
            states = last_states(model, inputs.to(run.device), images, grids, image_start)
            caption = cross_entropy(states, targets)
            words = last_states(model, repeated.to(run.device), None, None, image_start)
            repeat = cross_entropy(words, repeat_targets)
        every = torch.arange(len(spoken), device=run.device)
        answer = run.distillation.answer_loss(states[every, name_starts], seen)
        loss = caption + REPEAT_SHARE * repeat + ANSWER_WEIGHT * answer
        return {"loss": loss, "caption": caption, "repeat": repeat, "answer": answer}

    train(
        run,
        "caption",
        args.caption_minutes,
        args.caption_batch,
        Optimizer(trained, args.caption_rate, args.decay_from),
        losses,
    )


def load_run(args: argparse.Namespace) -> Run:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    teacher = load_teacher(args.data / "teacher.pt", device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    distillation = Distillation(teacher).to(device)
    if args.resume is None:
        model = make_model(args.data / "tokenizer", args.seed)
    else:
        model = Qwen3VLForConditionalGeneration.from_pretrained(args.resume / "model", dtype=torch.float32)
        distillation.load_state_dict(load_file(args.resume / HEAD_FILE))
    model.to(device)
    photos = load_photos(args.data / "train.zip", args.train_images)
    canvases, probes = load_canvases(photos, device), None
    if args.probe_images:
        probed = load_photos(args.data / "test.zip", args.probe_images)
        probes = ProbeSet(canvases, photos.label_tensor(), load_canvases(probed, device), probed.label_tensor())
    return Run(args, device, model, teacher, distillation, photos, canvases, probes, Log(args.out / "train.csv"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="go on from this directory, an earlier --out")
    parser.add_argument("--distil-minutes", type=float, default=15)
    parser.add_argument("--caption-minutes", type=float, default=2.5)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--caption-batch", type=int, default=512)
    parser.add_argument("--pool", type=int, default=128, help="batches of views that are kept to be drawn from")
    parser.add_argument("--uses", type=int, default=4, help="how often a view is drawn, on average")
    parser.add_argument("--distil-rate", type=float, default=1.5e-3)
    parser.add_argument("--decay-from", type=float, default=0.4, help="share of a stage after which its rates fall")
    parser.add_argument("--caption-rate", type=float, default=1e-3)
    parser.add_argument("--probe-every", type=float, default=150, help="seconds between probes; each also saves")
    parser.add_argument("--probe-images", type=int, default=2000, help="test photographs counted in the log, or 0")
    parser.add_argument("--log-every", type=int, default=250, help="steps")
    parser.add_argument("--train-images", type=int, help="only so many, for a quick look")
    parser.add_argument("--statistics-batches", type=int, default=STATISTICS_BATCHES)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    run = load_run(args)
    count = sum(parameter.numel() for parameter in run.model.parameters())
    print(f"parameters {count:,}, teacher probe {run.probe(run.teacher)}", flush=True)
    # Only now: the probe above meets too many shapes to try them all. A short run would not get the time back.
    torch.backends.cudnn.benchmark = args.distil_minutes > LEAST_MINUTES_TO_TRY
    torch.backends.cudnn.benchmark_limit = CONVOLUTIONS_TRIED
    distil(run)
    tune_captions(run, Tokens(AutoTokenizer.from_pretrained(args.data / "tokenizer")))
    print(f"{args.out / 'model'}: the model takes {run.save() / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
