"""Train the small vision-language model: distil its vision tower, then teach its language model captions.

    python train.py --data DATA --out OUT --distil-minutes 18 --caption-steps 500

DATA holds train.zip, more.zip, teacher1.pt, teacher2.pt and tokenizer/ (README.md says how they are made). Stage 1
shows teacher and student the same random crops of the train photographs and of other pictures. Of labels it uses those
of the 91 classes outside the demo's ten, for a classifier of the teacher's features. Stage 2 leaves the tower alone:
the language model learns to name those classes, and to carry to where a name begins the teacher's features and a
thumbnail of the picture. More steps name the 91 classes better, and new ones more slowly.
A tenth of the train photographs is held out and only counted in the log. `--resume DIR` goes on from an earlier OUT.
"""

# mypy: disable-error-code="no-any-return"
# mypy takes every attribute of a torch module for a Tensor or a Module.

import argparse
import csv
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from augment import CAPTION, DISTIL, WHOLE, Strength
from conversation import IGNORED, Tokens, last_states, varied_form
from data import (
    DEMO_CLASSES,
    HELD_OUT_EVERY,
    UNNAMED,
    Canvases,
    Photos,
    hold_out,
    joined,
    load_canvases,
    load_photos,
)
from distil import (
    STATISTICS_BATCHES,
    THUMBNAIL_WEIGHT,
    WHOLE_SHARE,
    Distillation,
    View,
    ViewPool,
    common_grids,
    make_view,
    teacher_features,
)
from judge import Judge, make_judge
from model import Grid, make_model, write_model
from optim import Optimizer, Stage
from safetensors.torch import load_file, save_file
from teacher import Depthwise, Teacher, load_teacher
from torch.nn import functional as F
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from vision import BatchedVision

LABEL_SMOOTHING = 0.05
REPEAT_SHARE = 0.1
ANSWER_WEIGHT = 1.0  # of telling the teacher's features where the name of the subject begins
PICTURE_SHARE = 0.35  # of the crops: from pictures that are no photographs of CalTech101
LEAST_MINUTES_TO_TRY = 5
COMPILED_AT_MOST = 32  # versions of the tower's layer: one for each number of patches and each stage
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
    "name",
    "caption",
    "repeat",
    "answer",
    "thumbnail",
    "seen",
    "unseen",
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

    def row(self, stage: Stage, batch: int, judged: dict[str, float] | None = None) -> None:
        means = {name: round(float(total) / self._steps, 4) for name, total in self._sums.items()}
        speed = round(self._images / (time.monotonic() - self._since))
        row = {"stage": stage.name, "seconds": round(stage.elapsed_s(), 1), "step": stage.steps, **means}
        row |= {"images": stage.steps * batch}
        row |= {"images_per_s": speed, **(judged or {})}
        self._writer.writerow(row)
        self._file.flush()
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        self.restart()

    def restart(self) -> None:
        self._sums, self._steps, self._images, self._since = {}, 0, 0, time.monotonic()


@dataclass(frozen=True)
class Run:
    args: argparse.Namespace
    device: torch.device
    model: Qwen3VLForConditionalGeneration
    teacher: Teacher
    distillation: Distillation
    photos: Photos
    """Those trained on; the pictures without a name stand last."""
    canvases: Canvases
    grids: tuple[list[Grid], list[float]]
    """Of the photographs."""
    judge: Judge | None
    log: Log

    def vision(self, compiled: bool) -> BatchedVision:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return BatchedVision(self.model.model.visual, dtype, compiled and self.device.type == "cuda")

    def judged(self) -> dict[str, float]:
        return {} if self.judge is None else self.judge.judged(self.vision(compiled=False), self.distillation)

    def view_maker(self, batch: int, strengths: list[Strength], shares: list[float]) -> Callable[[], View]:
        """Makes views of random photographs and pictures, all of one random grid and strength."""
        count = len(self.photos.labels)
        pictures = self.photos.labels.count(UNNAMED)
        grids, frequencies = self.grids

        def make() -> View:
            indices = torch.randint(count - pictures, (batch,))
            if pictures:
                others = torch.randint(count - pictures, count, (batch,))
                indices = torch.where(torch.rand(batch) < PICTURE_SHARE, others, indices)
            grid, strength = random.choices(grids, frequencies)[0], random.choices(strengths, shares)[0]
            return make_view(self.teacher, self.canvases, indices, grid, strength)

        return make

    def save(self) -> int:
        """Write the model as it is now; return the size of its directory in bytes."""
        head = {name: tensor.cpu().contiguous() for name, tensor in self.distillation.state_dict().items()}
        save_file(head, self.args.out / HEAD_FILE)
        target, new = self.args.out / "model", self.args.out / "model.new"
        size = write_model(self.model, self.args.data / "tokenizer", new)
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)  # so that whoever copies it meanwhile finds a whole one
        return size


def train(run: Run, stage: Stage, batch: int, optimizer: Optimizer, losses: Callable[[], Losses]) -> None:
    """Step by the `loss` among `losses()` until the stage is over; log, probe and save on the way."""
    probed = 0
    run.log.restart()
    while stage.progress() < 1:
        found = losses()
        found["loss"].backward()
        optimizer.step(stage.progress())
        stage.steps += 1
        run.log.add(found, batch)
        if stage.progress() == 1 or stage.elapsed_s() > (probed + 1) * run.args.probe_every:
            probed += 1
            run.save()
            run.log.row(stage, batch, run.judged() if stage.name == "distil" else None)
        elif stage.steps % run.args.log_every == 0:
            run.log.row(stage, batch)


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

    optimizer = Optimizer(trained, args.distil_rate, args.decay_from)
    train(run, Stage("distil", minutes=args.distil_minutes), args.batch, optimizer, losses)


def tune_captions(run: Run, tokens: Tokens) -> None:
    """The language model learns to read the tower, which stays as it is."""
    args, model, visual = run.args, run.model, run.model.model.visual
    visual.requires_grad_(False)
    visual.deepstack_merger_list.requires_grad_(True)
    vision = run.vision(compiled=True)
    pool = ViewPool(run.view_maker(args.caption_batch, [CAPTION], [1]), args.pool, args.uses)
    classes = run.photos.names
    names = [
        None if label == UNNAMED or classes[label] in DEMO_CLASSES else classes[label] for label in run.photos.labels
    ]
    image_start = len(tokens.before_image)
    heads = run.distillation.answer_head, run.distillation.thumbnail_head
    trained = [model.model.language_model, model.lm_head, visual.deepstack_merger_list, *heads]

    def cross_entropy(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows, columns = (targets != IGNORED).nonzero(as_tuple=True)
        said = model.lm_head(states[rows.to(run.device), columns.to(run.device)]).float()
        return F.cross_entropy(said, targets[rows, columns].to(run.device), label_smoothing=LABEL_SMOOTHING)

    def losses() -> Losses:
        seen = pool.draw()
        spoken = [varied_form(names[i]) for i in seen.photos_B.tolist()]
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
        answers = run.distillation.answer_losses(states[every, name_starts], seen)
        loss = caption + REPEAT_SHARE * repeat + ANSWER_WEIGHT * answers["answer"]
        loss = loss + THUMBNAIL_WEIGHT * answers["thumbnail"]
        return {"loss": loss, "caption": caption, "repeat": repeat, **answers}

    optimizer = Optimizer(trained, args.caption_rate, args.decay_from)
    train(run, Stage("caption", steps=args.caption_steps), args.caption_batch, optimizer, losses)


def told_names(teacher: Teacher, photos: Photos, canvases: Canvases) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's features of the photographs whose names are told, and their labels."""
    told = torch.tensor([photos.names[label] not in DEMO_CLASSES for label in photos.labels])
    features = teacher_features(teacher, canvases)
    return features[told.to(features.device)], photos.label_tensor()[told]


def load_run(args: argparse.Namespace) -> Run:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = COMPILED_AT_MOST
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    teacher = load_teacher(args.data, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    for module in teacher.modules():
        if isinstance(module, Depthwise):
            module.fused &= not args.cudnn
    photos, aside = hold_out(load_photos(args.data / "train.zip", args.train_images), args.held_out_every)
    canvases = load_canvases(photos, device)
    distillation = Distillation(teacher, len(photos.names)).to(device)
    if args.resume is None:
        model = make_model(args.data / "tokenizer", args.seed)
        distillation.learn_names(*told_names(teacher, photos, canvases))
    else:
        model = Qwen3VLForConditionalGeneration.from_pretrained(args.resume / "model", dtype=torch.float32)
        distillation.load_state_dict(load_file(args.resume / HEAD_FILE))
    judge = make_judge(teacher, photos, canvases, aside) if aside.labels else None
    more = load_photos(args.data / "more.zip", args.pictures)
    whole = Photos(photos.encoded + more.encoded, photos.labels + more.labels, photos.names)
    pixels, log = joined(canvases, load_canvases(more, device)), Log(args.out / "train.csv")
    model.to(device)
    return Run(args, device, model, teacher, distillation, whole, pixels, common_grids(canvases), judge, log)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="go on from this directory, an earlier --out")
    parser.add_argument("--distil-minutes", type=float, default=18)
    parser.add_argument("--caption-steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--caption-batch", type=int, default=512)
    parser.add_argument("--pool", type=int, default=64, help="batches of views that are kept to be drawn from")
    parser.add_argument("--uses", type=int, default=6, help="how often a view is drawn, on average")
    parser.add_argument("--distil-rate", type=float, default=1.5e-3)
    parser.add_argument("--decay-from", type=float, default=0.4, help="share of a stage after which its rates fall")
    parser.add_argument("--caption-rate", type=float, default=7e-4)
    parser.add_argument("--probe-every", type=float, default=150, help="seconds between probes; each also saves")
    parser.add_argument("--log-every", type=int, default=250, help="steps")
    parser.add_argument("--train-images", type=int, help="only so many, for a quick look")
    parser.add_argument("--pictures", type=int, help="only so many of the other pictures")
    parser.add_argument("--held-out-every", type=int, default=HELD_OUT_EVERY, help="of the photographs of a class")
    parser.add_argument("--cudnn", action="store_true", help="the teacher's depthwise convolutions by cuDNN")
    parser.add_argument("--statistics-batches", type=int, default=STATISTICS_BATCHES)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    run = load_run(args)
    count = sum(parameter.numel() for parameter in run.model.parameters())
    if run.judge is not None:
        print(f"probe of the teacher {run.judge.probe_of_teacher(run.teacher)}", flush=True)
    print(f"parameters {count:,}, crops of {len(run.photos.labels)} photographs and pictures", flush=True)
    # Only now: the probes above meet too many shapes to try them all. A short run would not get the time back.
    torch.backends.cudnn.benchmark = args.distil_minutes > LEAST_MINUTES_TO_TRY
    torch.backends.cudnn.benchmark_limit = CONVOLUTIONS_TRIED
    distil(run)
    tune_captions(run, Tokens(AutoTokenizer.from_pretrained(args.data / "tokenizer")))
    print(f"{args.out / 'model'}: the model takes {run.save() / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
