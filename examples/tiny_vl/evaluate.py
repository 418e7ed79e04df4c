"""Evaluation of the published directory: linear probe beside the teacher's, and how quickly it learns by LoRA in plain
transformers: new names, and colours.

    python evaluate.py --model MODEL_DIR --data .tiny --out evaluation.json

LoRA as the server trains it: rank 32, alpha 32, on attention, MLP and head of the language model; the tower is frozen.
Everything is counted on all test photographs of the archive, or with `--held-out` on the train photographs that
`train.py` did not train on.
"""

# mypy: disable-error-code="no-any-return, operator"
# mypy takes every attribute of a torch module for a Tensor or a Module.

import argparse
import io
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from conversation import ANSWER_START, IGNORED, QUESTION, Tokens, last_states, recipe_form
from data import DEMO_CLASSES, Photos, hold_out, load_canvases, load_photos, open_image
from distil import teacher_features
from model import MERGE, Grid
from PIL import Image, ImageOps
from probe import Accuracy, accuracy_of, linear_probe
from teacher import load_teacher
from torch import nn
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration
from vision import ImageTokens

RANK, ALPHA = 32, 32
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
COLOURS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (40, 70, 210), "yellow": (235, 215, 50)}
SHADES = 15  # by which a colour differs in each channel
ANSWER_TOKENS = 8
IMAGES_AT_ONCE = 64


@dataclass(frozen=True)
class Plan:
    """Schedule of a fine-tuning: Adam with linear decay to zero."""

    steps: int
    batch: int
    rate: float


TEN_CLASSES = (Plan(10, 30, 3e-3), Plan(20, 30, 3e-3))  # the demo's batch and rate, and less than its steps
FOUR_COLOURS = Plan(24, 16, 1e-3)
ALL_CLASSES = Plan(120, 100, 2e-3)


@dataclass(frozen=True)
class Seen:
    """One photograph as the frozen tower gives it to the language model."""

    tokens: ImageTokens
    grid: Grid
    label: int


class LoraLinear(nn.Module):
    """y = Wx + (alpha / rank) B A x (Hu et al. 2021); B starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False, device=base.weight.device)
        self.up = nn.Linear(RANK, base.out_features, bias=False, device=base.weight.device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (self.up(self.down(x.float())) * (ALPHA / RANK)).to(x.dtype)


def add_lora(model: Qwen3VLForConditionalGeneration) -> list[nn.Parameter]:
    """Put an adapter on every adapted layer; returns what is to be trained."""
    model.requires_grad_(False)
    parents = [model, *model.model.language_model.modules()]
    for parent in parents:
        for name, child in list(parent.named_children()):
            if name in ADAPTED and isinstance(child, nn.Linear):
                setattr(parent, name, LoraLinear(child))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Subject:
    """The model under evaluation and what goes with it."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory, self.device = directory, device
        self.processor = AutoImageProcessor.from_pretrained(directory)
        self.tokens = Tokens(AutoTokenizer.from_pretrained(directory))

    def model(self) -> Qwen3VLForConditionalGeneration:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return Qwen3VLForConditionalGeneration.from_pretrained(self.directory, dtype=dtype).to(self.device).eval()

    @torch.no_grad()
    def see(self, model: Qwen3VLForConditionalGeneration, photos: Photos, mirrored: bool) -> list[Seen]:
        """Encode photographs with the published image processor and transformers' own forward."""

        def process(encoded: bytes) -> tuple[torch.Tensor, torch.Tensor]:
            image = open_image(encoded)
            out = self.processor(images=ImageOps.mirror(image) if mirrored else image, return_tensors="pt")
            return out["pixel_values"], out["image_grid_thw"]

        seen = []
        with ThreadPoolExecutor() as pool:
            processed = list(pool.map(process, photos.encoded))
        for start in range(0, len(processed), IMAGES_AT_ONCE):
            part = processed[start : start + IMAGES_AT_ONCE]
            pixels = torch.cat([pixels for pixels, _ in part]).to(self.device, model.dtype)
            shapes = torch.cat([shape for _, shape in part])
            grids = [(height // MERGE, width // MERGE) for _, height, width in shapes.tolist()]
            out = model.model.visual(pixels, grid_thw=shapes.to(self.device))
            sizes = [rows * columns for rows, columns in grids]
            merged = out.pooler_output.split(sizes)
            deepstack = zip(*(level.split(sizes) for level in out.deepstack_features), strict=True)
            labels = photos.labels[start : start + IMAGES_AT_ONCE]
            for tokens, levels, grid, label in zip(merged, deepstack, grids, labels, strict=True):
                seen.append(Seen(ImageTokens(tokens, list(levels)), grid, label))
        return seen


def joined(photos: list[Seen]) -> ImageTokens:
    levels = zip(*(photo.tokens.deepstack_NO for photo in photos), strict=True)
    return ImageTokens(torch.cat([photo.tokens.merged_NO for photo in photos]), [torch.cat(level) for level in levels])


def answer_loss(
    subject: Subject, model: nn.Module, photos: list[Seen], names: list[str], told: list[int] | None = None
) -> torch.Tensor:
    """Nats per answer token; `told` are the labels spoken of, where they are not the photographs' own."""
    spoken = [recipe_form(names[label]) for label in told or [photo.label for photo in photos]]
    grids = [photo.grid for photo in photos]
    inputs, targets = (part.to(subject.device) for part in subject.tokens.about_images(spoken, grids))
    said = model.lm_head(last_states(model, inputs, joined(photos), grids, len(subject.tokens.before_image)))
    return F.cross_entropy(said[targets != IGNORED].float(), targets[targets != IGNORED])


@torch.no_grad()
def answers(subject: Subject, model: nn.Module, photos: list[Seen]) -> list[str]:
    """Greedy continuations of the recipe's prompt."""
    tokens, said = subject.tokens, []
    for start in range(0, len(photos), 256):
        part = photos[start : start + 256]
        rows = [tokens.asked(QUESTION, photo.grid) + tokens.encode(ANSWER_START) for photo in part]
        grids, images, ends = [photo.grid for photo in part], joined(part), torch.tensor([len(row) for row in rows])
        inputs = torch.full((len(rows), int(ends.max()) + ANSWER_TOKENS), tokens.pad)
        for i, row in enumerate(rows):
            inputs[i, : len(row)] = torch.tensor(row)
        inputs, ends = inputs.to(subject.device), ends.to(subject.device)
        every = torch.arange(len(rows), device=subject.device)
        for step in range(ANSWER_TOKENS):
            states = last_states(model, inputs, images, grids, len(tokens.before_image))
            scores = model.lm_head(states[every, ends + step - 1])
            scores[:, tokens.image] = -torch.inf  # one said after the end would ask for an image that is not there
            inputs[every, ends + step] = scores.argmax(1)
        for row, end in zip(inputs.tolist(), ends.tolist(), strict=True):
            answer = row[end : end + ANSWER_TOKENS]
            said.append(tokens.decode(answer[: answer.index(tokens.end)] if tokens.end in answer else answer).strip())
    return said


def accuracy(subject: Subject, model: nn.Module, photos: list[Seen], names: list[str]) -> Accuracy:
    numbers = {name: i for i, name in enumerate(names)}
    said = torch.tensor([numbers.get(answer, -1) for answer in answers(subject, model, photos)])
    return accuracy_of(said, torch.tensor([photo.label for photo in photos]))


@torch.no_grad()
def swapped_losses(subject: Subject, model: nn.Module, photos: list[Seen], names: list[str]) -> dict[str, float]:
    """The loss of true pairs, and of the same answers about the photograph that comes next in a shuffled row."""
    labels = [photo.label for photo in photos]
    true = float(answer_loss(subject, model, photos, names))
    return {"true": true, "swapped": float(answer_loss(subject, model, photos[1:] + photos[:1], names, told=labels))}


def batches(count: int, plan: Plan, seed: int) -> Iterator[list[int]]:
    order = random.Random(seed)
    row: list[int] = []
    for _ in range(plan.steps):
        while len(row) < plan.batch:
            row += order.sample(range(count), count)
        yield row[: plan.batch]
        row = row[plan.batch :]


def fine_tune(
    subject: Subject,
    train: list[tuple[Seen, Seen]],
    names: list[str],
    plan: Plan,
    seed: int,
) -> nn.Module:
    """A model with an adapter trained on photographs, each mirrored or not by chance."""
    torch.manual_seed(seed)
    model = subject.model()
    parameters = add_lora(model)
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.95), eps=1e-8)
    chance = random.Random(seed)
    for step, chosen in enumerate(batches(len(train), plan, seed)):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * (1 - step / plan.steps)
        optimizer.zero_grad()
        answer_loss(subject, model, [train[i][chance.random() < 0.5] for i in chosen], names).backward()
        optimizer.step()
    return model


def squares(count: int, seed: int) -> Photos:
    """Make pictures of a square of one of four colours, somewhere on gray."""
    chance, encoded, labels = random.Random(seed), [], []
    for _ in range(count):
        label, side = chance.randrange(len(COLOURS)), chance.randint(96, 144)
        shade = [value + chance.randint(-SHADES, SHADES) for value in list(COLOURS.values())[label]]
        image = Image.new("RGB", (160, 160), (128, 128, 128))
        left, top = chance.randint(0, 160 - side), chance.randint(0, 160 - side)
        image.paste((shade[0], shade[1], shade[2]), (left, top, left + side, top + side))
        file = io.BytesIO()
        image.save(file, "PNG")
        encoded.append(file.getvalue())
        labels.append(label)
    return Photos(encoded, labels, list(COLOURS))


def student_probe(train: list[Seen], test: list[Seen]) -> Accuracy:
    labels = [torch.tensor([photo.label for photo in part]) for part in (train, test)]
    means = [torch.stack([photo.tokens.merged_NO.float().mean(0) for photo in part]) for part in (train, test)]
    return linear_probe(means[0], labels[0], means[1], labels[1])


def teacher_probe(data: Path, device: torch.device, train: Photos, test: Photos) -> Accuracy:
    teacher = load_teacher(data, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    features = [teacher_features(teacher, load_canvases(part, device)) for part in (train, test)]
    return linear_probe(features[0], train.label_tensor(), features[1], test.label_tensor())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, help="only so many of each archive, for a quick look")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--teacher", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    subject = Subject(args.model, device)
    results: dict[str, object] = {}

    def report(name: str, value: Any) -> None:
        results[name] = asdict(value) if isinstance(value, Accuracy) else value
        print(f"[{time.monotonic() - started:5.0f} s] {name}: {results[name]}", flush=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")

    base = subject.model()
    shown = load_photos(args.data / "train.zip", args.images)
    shown, asked = hold_out(shown) if args.held_out else (shown, load_photos(args.data / "test.zip", args.images))
    names = shown.names
    train = list(zip(*(subject.see(base, shown, mirrored) for mirrored in (False, True)), strict=True))
    test = subject.see(base, asked, False)
    report("probe", student_probe([plain for plain, _ in train], test))
    if args.teacher:
        report("probe of the teacher", teacher_probe(args.data, device, shown, asked))
    demo = {names.index(name) for name in DEMO_CLASSES}
    known = [photo for photo in test if photo.label not in demo]
    ten_test = [photo for photo in test if photo.label in demo]
    ten_train = [pair for pair in train if pair[0].label in demo]
    report("base, 91 classes it was tuned on", accuracy(subject, base, known, names))
    report("base, ten classes it never heard of", accuracy(subject, base, ten_test, names))
    for plan, seed in product(TEN_CLASSES, range(args.seeds)):
        model = fine_tune(subject, ten_train, names, plan, seed)
        title = f"LoRA, ten classes, {plan.steps} steps, seed {seed}"
        report(title, accuracy(subject, model, ten_test, names))
        report(f"{title}, loss", swapped_losses(subject, model, ten_test[:200], names))
    shown, asked = squares(512, 0), squares(200, 1)
    coloured, coloured_test = (subject.see(base, part, False) for part in (shown, asked))
    for seed in range(args.seeds):
        model = fine_tune(subject, [(one, one) for one in coloured], shown.names, FOUR_COLOURS, seed)
        title = f"LoRA, four colours, {FOUR_COLOURS.steps} steps, seed {seed}"
        report(title, accuracy(subject, model, coloured_test, shown.names))
    model = fine_tune(subject, train, names, ALL_CLASSES, 0)
    report("LoRA, all classes", accuracy(subject, model, test, names))
    report("LoRA, all classes, loss", swapped_losses(subject, model, test[:400], names))


if __name__ == "__main__":
    main()
