"""Random packed rows of several models on CUDA in bfloat16, each model against transformers + PEFT in float32.

    pytest tests/gpu/test_truth.py            all rows; the worst are printed at the end
    pytest tests/gpu/test_truth.py -k tail-3  one of them

The bounds hold for each model of a row: in a row as a whole, what a small model loses is lost among the others.
"""

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from api_schemas.inputs import Chunk, Datum, ModelInput
from api_schemas.training import ForwardBackwardOutput, Trainable
from backends.inputs.rendering import Renderer
from backends.model_spec import Placement
from backends.trainer.distributed import World
from backends.trainer.model.cuda_graphs import TOKENS
from backends.trainer.rank import TrainerRank
from benchmarks.gpu import Shape, make_model
from tests.factories import cross_entropy, image, make_renderer, prompt, words
from tests.trainers import config, gradients, reference_inputs, relative_distance, together

pytestmark = pytest.mark.gpu
SHAPE = Shape(
    hidden=1024,
    inner=3072,
    vision={
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_heads": 4,
        "deepstack_visual_indexes": [0, 1, 2],
    },
    tied=False,
    num_layers=4,
)
"""Small enough for float32; attention, the head and its chunks are those of 4 billion parameters."""
MAX_TOKENS, LONGEST = 16_384, 6_500
"""Of a row and of a datum."""
RANKS = (1, 2, 4, 8, 16, 32, 64)
IMAGE_SIDES = ((64, 64), (320, 256), (96, 200), (640, 480))
GRADIENT, MEAN, LARGEST = 0.05, 0.02, 0.2
"""Of the gradient's norm; of the log probabilities, nats."""
Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Composition:
    """A row: for each model its rank and the tokens of its datums; some datums have images."""

    name: str
    models: tuple[tuple[int, Lengths], ...]
    has_images: bool = False

    @property
    def num_tokens(self) -> int:
        """Of the row."""
        return sum(sum(lengths) for _, lengths in self.models)


def compositions() -> list[Composition]:
    """112 rows, the same in every run."""
    rows = [Composition("two-long-ones-then-four-tokens", ((32, (2955,)), (4, (5349, 6285)), (1, (1, 1, 1, 1))))]
    for size in TOKENS:
        rows += [_with_total(f"graph-{size}{more:+d}", size + more, few=24) for more in (-1, 0, 1)]
    # A last step of a product over tokens, and in it a small model: what it loses shows nowhere else.
    totals = [block * 64 + left for block in (65, 129, 228, 255) for left in (1, 2, 3, 4, 7, 9, 63)]
    rows += [_with_tail(f"tail-{number}", total) for number, total in enumerate(totals)]
    rows += [_with_long_ones(f"long-{number}") for number in range(16)]
    rows += [_with_many(f"many-{number}") for number in range(5)]
    rows += [_with_total(f"images-{number}", _random(number).integers(500, 9000), few=8) for number in range(38)]
    return [dataclasses.replace(row, has_images=row.name.startswith("images")) for row in rows]


def _random(*seed: int | str) -> np.random.Generator:
    return np.random.default_rng([one if isinstance(one, int) else zlib.crc32(one.encode()) for one in seed])


def _cut(total: int, pieces: int, random: np.random.Generator) -> Lengths:
    """`total` tokens in so many datums of random lengths, none longer than may be."""
    ends = np.sort(random.choice(np.arange(1, total), pieces - 1, replace=False))
    lengths = np.diff([0, *ends, total]).tolist()
    return tuple(part for length in lengths for part in _halved(length))


def _halved(length: int) -> list[int]:
    return [length] if length <= LONGEST else [*_halved(length // 2), *_halved(length - length // 2)]


def _with_total(name: str, total: int, few: int) -> Composition:
    random = _random(name)
    shares = _cut(total, int(random.integers(1, 5)), random)
    models = [
        (int(random.choice(RANKS)), _cut(share, int(random.integers(1, max(2, min(few, share)))), random))
        for share in shares[:4]
    ]
    missing = total - sum(sum(lengths) for _, lengths in models)
    if missing:
        rank, lengths = models[0]
        models[0] = rank, (*lengths, *_halved(missing))
    return Composition(name, tuple(models))


def _with_tail(name: str, total: int) -> Composition:
    random = _random(name)
    tail = tuple([1] * int(random.integers(1, 5)))
    first = _with_total(name, total - len(tail), few=6).models[:3]
    rest = total - len(tail) - sum(sum(lengths) for _, lengths in first)
    first = ((first[0][0], (*first[0][1], *(_halved(rest) if rest else []))), *first[1:])
    return Composition(name, (*first, (int(random.choice(RANKS)), tail)))


def _with_long_ones(name: str) -> Composition:
    """Datums that cuDNN takes, and of one token, in any order."""
    random = _random(name)
    models = []
    for _ in range(int(random.integers(2, 5))):
        kinds = random.integers(0, 3, int(random.integers(1, 5)))
        choices = ([1], random.integers(4090, LONGEST, 1), random.integers(2, 500, 1))
        models.append((int(random.choice(RANKS)), [int(choices[kind][0]) for kind in kinds]))
    while sum(sum(lengths) for _, lengths in models) > MAX_TOKENS:
        max((lengths for _, lengths in models), key=lambda lengths: max(lengths)).sort()
        longest = max((lengths for _, lengths in models), key=max)
        longest[longest.index(max(longest))] = 1
    return Composition(name, tuple((rank, tuple(lengths)) for rank, lengths in models))


def _with_many(name: str) -> Composition:
    """130 datums, half of them of one model, many of one token."""
    random = _random(name)
    lengths = np.where(random.random(130) < 0.4, 1, random.integers(2, 90, 130)).tolist()
    return Composition(name, ((8, tuple(lengths[:65])), (2, tuple(lengths[65:100])), (1, tuple(lengths[100:]))))


def data_of(row: Composition, renderer: Renderer) -> list[list[Datum]]:
    """Of each model."""
    random = _random(row.name, "data")
    return [[_datum(length, row, renderer, random) for length in lengths] for _, lengths in row.models]


def _datum(length: int, row: Composition, renderer: Renderer, random: np.random.Generator) -> Datum:
    inputs = prompt(words(length, int(random.integers(1 << 30))))
    if row.has_images and random.random() < 0.7:
        inputs = _with_images(inputs, length, renderer, random)
    num_tokens, _ = renderer.layout(inputs, "datum")
    weights = random.normal(size=num_tokens).astype(np.float32) * (random.random(num_tokens) < 0.8)
    weights[-1] = random.choice([-1, 1])  # one at least
    targets = random.integers(0, 300, num_tokens)
    return Datum(model_input=inputs, loss_fn_inputs={"target_tokens": targets, "weights": weights})


def _with_images(inputs: ModelInput, length: int, renderer: Renderer, random: np.random.Generator) -> ModelInput:
    """The same number of tokens, some of them of one or two images; as it is where they do not fit."""
    pictures: list[Chunk] = [image(*IMAGE_SIDES[random.integers(4)], int(random.integers(50)))]
    if random.random() < 0.5:  # apart: transformers takes two images side by side for one
        pictures += [words(1), image(*IMAGE_SIDES[random.integers(4)], int(random.integers(50)))]
    taken, _ = renderer.layout(prompt(*pictures), "datum")
    if taken + 2 > length:
        return inputs
    before = int(random.integers(0, length - taken))
    texts = [words(count, before) for count in (before, length - taken - before)]
    chunks = [*([texts[0]] if before else []), *pictures, texts[1]]
    return prompt(*chunks)


class Reference:
    """transformers + PEFT in float32 on the same GPU, datum by datum."""

    def __init__(self, source: Path) -> None:
        model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).cuda().eval()
        targets = r".*(language_model.*\.(q|k|v|o|gate|up|down)_proj|lm_head)"
        configs = {f"r{r}": PeftLoraConfig(r=r, lora_alpha=32, target_modules=targets) for r in RANKS}
        (first, one), *others = configs.items()
        self.model: PeftModel = get_peft_model(model, one, adapter_name=first)
        for name, other in others:
            self.model.add_adapter(name, other)

    def compute(
        self, rank: int, weights: dict[str, torch.Tensor], data: Sequence[Datum], renderer: Renderer
    ) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
        """Log probabilities of each datum, nats, and the summed gradients by their name in a PEFT file."""
        adapter = f"r{rank}"
        self.model.set_adapter(adapter)
        own = {
            name.replace(f".{adapter}.", "."): tensor
            for name, tensor in self.model.named_parameters()
            if "lora_" in name and f".{adapter}." in name
        }
        assert own.keys() == weights.keys()
        for name, tensor in own.items():
            tensor.data.copy_(weights[name])
            tensor.grad = None
        found = []
        for item in data:
            inputs = reference_inputs(renderer, item.model_input, self.model)
            logits_TV = self.model(**{key: one.cuda() for key, one in inputs.items()}, use_cache=False).logits[0]
            targets_T, weights_T = (
                torch.from_numpy(item.loss_fn_inputs[key]).cuda() for key in ("target_tokens", "weights")
            )
            logprobs_T = -F.cross_entropy(logits_TV, targets_T, reduction="none")
            (-(weights_T * logprobs_T).sum()).backward()
            found.append(logprobs_T.detach().cpu().numpy())
        return found, {name: tensor.grad for name, tensor in own.items()}


@dataclass
class Worst:
    """What was furthest from the truth, each with the row and the model that it was found in."""

    found: list[tuple[float, float, float, str]] = field(default_factory=list)

    def print(self) -> None:
        """The five worst by each of the three figures."""
        print(f"\n{torch.cuda.get_device_name()}: {len(self.found)} models of packed rows")
        for place, what in enumerate(
            ("gradient, of its norm", "log probabilities, mean", "log probabilities, largest")
        ):
            for one in sorted(self.found, key=lambda one: -one[place])[:5]:
                print(f"{what}: {one[place]:.4f} in {one[3]}")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return make_model(tmp_path_factory.mktemp("truth") / "model", SHAPE)


@pytest.fixture(scope="module")
def rank(source: Path) -> TrainerRank:
    settings = dataclasses.replace(
        config(source, MAX_TOKENS, 8192),
        device="cuda",
        dtype="bfloat16",
        shares_rows=True,
        placement=Placement(trainer_bytes=30 << 30),
    )
    return TrainerRank(settings, World(0, 1, torch.device("cuda", 0)))


@pytest.fixture(scope="module")
def reference(source: Path) -> Reference:
    return Reference(source)


@pytest.fixture(scope="module")
def renderer(source: Path) -> Renderer:
    return make_renderer(source)


@pytest.fixture(scope="module")
def worst() -> Iterator[Worst]:
    found = Worst()
    yield found
    found.print()


def test_there_are_a_hundred_rows_of_every_kind():
    rows = compositions()
    assert len(rows) >= 100 and len({row.name for row in rows}) == len(rows)
    assert all(row.num_tokens <= MAX_TOKENS and 1 <= len(row.models) <= 4 for row in rows)
    assert 3 * sum(row.has_images for row in rows) >= len(rows)
    lengths = {length for row in rows for _, of_model in row.models for length in of_model}
    assert min(lengths) == 1 and max(lengths) > 6000
    assert max(sum(len(of_model) for _, of_model in row.models) for row in rows) == 130
    assert {rank for row in rows for rank, _ in row.models} == set(RANKS)


@pytest.mark.parametrize("row", compositions(), ids=lambda row: row.name)
def test_each_model_of_a_packed_row_is_near_transformers_and_peft_in_float32(row, rank, reference, renderer, worst):
    data, names = data_of(row, renderer), [f"m{place}" for place in range(len(row.models))]
    generator = torch.Generator().manual_seed(row.num_tokens)
    for name, (lora_rank, _) in zip(names, row.models, strict=True):
        rank.create_model(name, Trainable(rank=lora_rank, seed=len(name) + lora_rank))
        for tensor_name, tensor in rank.tenants[name].adapter.tensors.items():
            if ".lora_B." in tensor_name:  # or a fresh adapter would add nothing
                tensor.copy_(torch.empty(tensor.shape).normal_(0, 0.02, generator=generator))
    outputs = together(rank, [(name, cross_entropy(own)) for name, own in zip(names, data, strict=True)])
    failed = []
    for name, (lora_rank, lengths), own, output in zip(names, row.models, data, outputs, strict=True):
        assert isinstance(output, ForwardBackwardOutput), output
        weights = rank.tenants[name].adapter.tensors
        logprobs, wanted = reference.compute(lora_rank, weights, own, renderer)
        apart = np.concatenate(
            [np.abs(one["logprobs"] - other) for one, other in zip(output.loss_fn_outputs, logprobs, strict=True)]
        )
        got = gradients(rank, name)
        gradient = relative_distance(got.values(), [wanted[key] for key in got])
        where = f"{row.name}, model {name} of rank {lora_rank}, datums of {lengths}; the row: {row.models}"
        worst.found.append((gradient, float(apart.mean()), float(apart.max()), where))
        if not (gradient <= GRADIENT and apart.mean() <= MEAN and apart.max() <= LARGEST):
            per_tensor = sorted(((relative_distance([got[key]], [wanted[key]]), key) for key in got), reverse=True)[:3]
            failed.append(
                f"gradient {gradient:.4f}, mean {apart.mean():.4f}, {apart.max():.4f} in {where}: {per_tensor}"
            )
        rank.delete_model(name)
    assert not failed, "\n".join(failed)
