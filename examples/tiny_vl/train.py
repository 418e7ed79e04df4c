"""Train the small vision-language model: distil its vision tower, then tune the whole on captions.

    python train.py --data .tiny --out OUT --distil-minutes 5.5 --caption-minutes 1.5

DATA holds train.zip, test.zip, teacher.pt and tokenizer/ (README.md says how they are made). Stage 1 shows teacher and
student the same random crops of the train photographs, without labels. Stage 2 teaches the language model to name the
91 classes outside the demo's ten, while the tower keeps distilling. Test photographs are only counted in the log.
`--resume DIR` goes on from an earlier OUT, for example in the next lease.
"""

import argparse
import csv
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from augment import CAPTION, DISTIL
from conversation import IGNORED, Tokens, logits, varied_form
from data import DEMO_CLASSES, Canvases, Photos, load_canvases, load_photos
from distil import STATISTICS_BATCHES, Distillation, common_grids, make_view, pooled_features
from model import make_model, write_model
from optim import Clock, Optimizer
from probe import linear_probe
from safetensors.torch import load_file, save_file
from teacher import load_teacher
from torch.nn import functional as F
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from vision import BatchedVision

LABEL_SMOOTHING = 0.05
REPEAT_SHARE = 0.1
KEEP_WEIGHT = 0.5  # of the distillation loss while captions are tuned
HEAD_FILE = "distillation_head.safetensors"
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

    def accuracy(self, vision: BatchedVision, teacher: torch.nn.Module | None, batch: int) -> float:
        train_x, test_x = (pooled_features(vision, teacher, part, batch) for part in (self.train, self.test))
        return linear_probe(train_x, self.train_labels, test_x, self.test_labels).overall


@dataclass(frozen=True)
class Run:
    args: argparse.Namespace
    device: torch.device
    model: Qwen3VLForConditionalGeneration
    vision: BatchedVision
    teacher: torch.nn.Module
    distillation: Distillation
    photos: Photos
    canvases: Canvases
    probes: ProbeSet
    log: Log

    def probe_due(self, clock: Clock, done: int) -> bool:
        return clock.elapsed() > (done + 1) * self.args.probe_every


def distil(run: Run) -> None:
    args = run.args
    grids, frequencies = common_grids(run.canvases)

    def view():
        indices = torch.randint(len(run.photos.labels), (args.batch,), device=run.device)
        return make_view(run.teacher, run.canvases, indices, random.choices(grids, frequencies)[0], DISTIL)

    if args.resume is None:
        run.distillation.measure([view() for _ in range(min(STATISTICS_BATCHES, args.statistics_batches))])
    visual = run.model.model.visual
    for merger in visual.deepstack_merger_list:  # not seen by this loss: it would only decay
        merger.requires_grad_(False)
    trained = [visual.patch_embed, visual.pos_embed, visual.blocks, visual.merger, run.distillation.head]
    optimizer = Optimizer([(trained, args.distil_rate)])
    clock, step, probed = Clock(args.distil_minutes), 0, 0
    run.log.restart()
    while clock.progress() < 1:
        seen = view()
        losses = run.distillation(run.vision(seen.pixels_B3HW), seen)
        losses["loss"].backward()
        optimizer.step(clock.progress())
        step += 1
        run.log.add(losses, args.batch)
        if step % args.log_every == 0:
            run.log.row("distil", clock, step, step * args.batch)
        if run.probe_due(clock, probed):
            probed += 1
            run.log.row("distil", clock, step, step * args.batch, run.probes.accuracy(run.vision, None, args.batch))
    if step:
        run.log.add(losses, 0)
        run.log.row("distil", clock, step, step * args.batch, run.probes.accuracy(run.vision, None, args.batch))


def tune_captions(run: Run, tokens: Tokens) -> None:
    args, model = run.args, run.model
    model.requires_grad_(True)
    known = [i for i, label in enumerate(run.photos.labels) if run.photos.names[label] not in DEMO_CLASSES]
    labels, known_tensor = run.photos.labels, torch.tensor(known)
    grids, frequencies = common_grids(run.canvases)
    visual, language = model.model.visual, model.model.language_model
    tower = [visual.patch_embed, visual.pos_embed, visual.blocks, visual.merger, run.distillation.head]
    text = [language, model.lm_head, visual.deepstack_merger_list]
    optimizer = Optimizer([(text, args.caption_rate), (tower, args.tower_rate)])
    clock, step, probed = Clock(args.caption_minutes), 0, 0
    image_start = len(tokens.before_image)
    run.log.restart()
    while clock.progress() < 1:
        chosen = known_tensor[torch.randint(len(known), (args.caption_batch,))].tolist()
        grid = random.choices(grids, frequencies)[0]
        seen = make_view(run.teacher, run.canvases, torch.tensor(chosen, device=run.device), grid, CAPTION)
        features = run.vision(seen.pixels_B3HW)
        losses = run.distillation(features, seen)
        spoken = [varied_form(run.photos.names[labels[i]]) for i in chosen]
        batches = [(tokens.about_images(spoken, [grid] * len(spoken)), features.flat(), [grid] * len(spoken))]
        batches.append((tokens.repetitions(max(1, round(args.caption_batch * REPEAT_SHARE))), None, None))
        caption = []
        with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
            for (inputs, targets), shown, shapes in batches:
                said = logits(model, inputs.to(run.device), shown, shapes, image_start)
                asked = targets.to(run.device) != IGNORED
                caption.append(
                    F.cross_entropy(said[asked].float(), targets.to(run.device)[asked], label_smoothing=LABEL_SMOOTHING)
                )
        losses["caption"] = caption[0]
        loss = caption[0] + REPEAT_SHARE * caption[1] + KEEP_WEIGHT * losses["loss"]
        loss.backward()
        optimizer.step(clock.progress())
        step += 1
        run.log.add(losses, args.caption_batch)
        if step % args.log_every == 0:
            run.log.row("caption", clock, step, step * args.caption_batch)
        if run.probe_due(clock, probed):
            probed += 1
            accuracy = run.probes.accuracy(run.vision, None, args.batch)
            run.log.row("caption", clock, step, step * args.caption_batch, accuracy)
    if step:
        run.log.add(losses, 0)
        accuracy = run.probes.accuracy(run.vision, None, args.batch)
        run.log.row("caption", clock, step, step * args.caption_batch, accuracy)


def load_run(args: argparse.Namespace) -> Run:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_float32_matmul_precision("high")
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    teacher = load_teacher(args.data / "teacher.pt", device, dtype)
    distillation = Distillation(teacher).to(device)
    if args.resume is None:
        model = make_model(args.data / "tokenizer", args.seed)
    else:
        model = Qwen3VLForConditionalGeneration.from_pretrained(args.resume / "model", dtype=torch.float32)
        distillation.load_state_dict(load_file(args.resume / HEAD_FILE))
    model.to(device)
    photos, probed = load_photos(args.data / "train.zip"), load_photos(args.data / "test.zip", args.probe_images)
    if args.train_images is not None:
        photos = load_photos(args.data / "train.zip", args.train_images)
    canvases, test = load_canvases(photos, device), load_canvases(probed, device)
    probes = ProbeSet(canvases, photos.label_tensor(), test, probed.label_tensor())
    vision, log = BatchedVision(model.model.visual, dtype), Log(args.out / "train.csv")
    return Run(args, device, model, vision, teacher, distillation, photos, canvases, probes, log)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="go on from this directory, an earlier --out")
    parser.add_argument("--distil-minutes", type=float, default=5.5)
    parser.add_argument("--caption-minutes", type=float, default=1.5)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--caption-batch", type=int, default=256)
    parser.add_argument("--distil-rate", type=float, default=1.5e-3)
    parser.add_argument("--caption-rate", type=float, default=1e-3)
    parser.add_argument("--tower-rate", type=float, default=2e-4)
    parser.add_argument("--probe-every", type=float, default=60, help="seconds")
    parser.add_argument("--probe-images", type=int, default=2000, help="test photographs counted in the log")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--train-images", type=int, help="only so many, for a quick look")
    parser.add_argument("--statistics-batches", type=int, default=STATISTICS_BATCHES)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    run = load_run(args)
    teacher_probe = run.probes.accuracy(run.vision, run.teacher, args.batch)
    print(
        f"parameters {sum(p.numel() for p in run.model.parameters()):,}, teacher probe {teacher_probe:.4f}", flush=True
    )
    torch.backends.cudnn.benchmark = True  # only now: the probe above meets too many shapes to try them all
    distil(run)
    tune_captions(run, Tokens(AutoTokenizer.from_pretrained(args.data / "tokenizer")))
    size = write_model(run.model, args.data / "tokenizer", args.out / "model")
    head = {name: tensor.cpu().contiguous() for name, tensor in run.distillation.state_dict().items()}
    save_file(head, args.out / HEAD_FILE)
    print(f"{args.out / 'model'}: the model takes {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
