"""Random packed microbatches of several models on CUDA in bfloat16, each model against transformers + PEFT in float32.

    pytest tests/gpu/test_truth.py            all microbatches; the worst are printed at the end
    pytest tests/gpu/test_truth.py -k tail-3  one of them

The bounds hold for each model of a row: in a row as a whole, what a small model loses is lost among the others.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.shapes import Shape, make_model
from tests.compositions import MAX_TOKENS, RANKS, Composition, compositions, data_of
from tests.factories import cross_entropy, datum, image, make_renderer, prompt, words
from tests.models import make_tiny_of, make_tiny_qwen3_5
from tests.published import OTHERS
from tests.trainers import config, gradients, lora_model, reference_inputs, relative_distance, together
from tinker_server.api_schemas.inputs import Chunk, Datum
from tinker_server.api_schemas.training import ForwardBackwardOutput, Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import Placement
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

pytestmark = pytest.mark.gpu
_PUBLISHED = OTHERS["Qwen/Qwen3-VL-4B-Instruct"]
SHAPE = Shape(
    {
        **_PUBLISHED,
        "text_config": {
            **_PUBLISHED["text_config"],
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 4,
            "tie_word_embeddings": False,
        },
        "vision_config": {
            **_PUBLISHED["vision_config"],
            "depth": 4,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_heads": 4,
            "out_hidden_size": 1024,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        "tie_word_embeddings": False,
    }
)
"""Small enough for float32; attention, the head and its chunks are those of 4 billion parameters."""
GRADIENT, MEAN, LARGEST = 0.05, 0.02, 0.2
"""Bounds on the gradient, as a part of its norm, and on log probabilities, in nats."""
AS_FAR = 2.0
"""How far a model may be, in what transformers in bfloat16 is, where that is more."""


TEXT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "sliding_window": 512,
}
KINDS: dict[str, Callable[[Path], Path]] = {
    "Mistral": partial(make_tiny_of, "mistral", **TEXT, num_attention_heads=32, num_key_value_heads=8, head_dim=128),
    "Gemma 3": partial(
        make_tiny_of,
        "gemma3_text",
        **TEXT,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    ),
    "Qwen3.5": partial(
        make_tiny_qwen3_5,
        **TEXT,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    ),
}
"""Kinds with windows, and with linear attention."""
ROWS_OF_KINDS = (
    *("graph-256+0", "graph-1024+1", "graph-4096-1", "graph-4096+1", "tail-3", "many-0"),
    *(f"long-{number}" for number in range(4)),
)


class Reference:
    """transformers + PEFT on the same GPU, in float32 or as `dtype` says, datum by datum."""

    def __init__(self, source: Path, dtype: torch.dtype = torch.float32) -> None:
        takes_images = (source / "preprocessor_config.json").exists()
        kind = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
        model = kind.from_pretrained(source, dtype=dtype).cuda().eval()
        targets = r".*(\.layers\..*\.(q|k|v|o|gate|up|down|out|in)_proj(_qkv|_z|_a|_b)?|lm_head)"
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
            logprobs_T = -F.cross_entropy(logits_TV.float(), targets_T, reduction="none")
            (-(weights_T * logprobs_T).sum()).backward()
            found.append(logprobs_T.detach().float().cpu().numpy())
        return found, {name: tensor.grad for name, tensor in own.items()}


@dataclass
class Worst:
    """The largest distances from the reference, each with its microbatch and model."""

    found: list[tuple[float, float, float, str]] = field(default_factory=list)

    def print(self) -> None:
        """The five worst by each of the three figures."""
        print(f"\n{torch.cuda.get_device_name()}: {len(self.found)} models of packed rows")
        for index, figure in enumerate(
            ("gradient, of its norm", "log probabilities, mean", "log probabilities, largest")
        ):
            for *figures, where in sorted(self.found, key=itemgetter(index), reverse=True)[:5]:
                print(f"{figure}: {figures[index]:.4f} in {where}")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return make_model(tmp_path_factory.mktemp("truth") / "model", SHAPE)


@pytest.fixture(scope="module")
def rank(source: Path) -> TrainerRank:
    return trainer_of(source)


def trainer_of(source: Path) -> TrainerRank:
    settings = dataclasses.replace(
        config(source, MAX_TOKENS, 8192),
        device="cuda",
        dtype="bfloat16",
        shares_microbatches=True,
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
def worst(request: pytest.FixtureRequest) -> Iterator[Worst]:
    found = Worst()
    yield found
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        found.print()


@pytest.mark.parametrize("row", compositions(), ids=lambda row: row.name)
def test_each_model_of_a_packed_microbatch_is_near_transformers_and_peft_in_float32(
    row, rank, reference, renderer, worst
):
    require_near(row, rank, (reference,), renderer, worst)


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_in_packed_microbatches_are_near_transformers_and_peft_in_float32(kind, tmp_path, worst):
    """By graphs and eagerly, with samples shorter and longer than the window, and as long as those that cuDNN takes in
    layers without one. Heads that are not normalised round more: each is allowed what transformers has in bfloat16."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    source = KINDS[kind](tmp_path / "model")
    rank, renderer = trainer_of(source), make_renderer(source)
    references = Reference(source), Reference(source, torch.bfloat16)
    rows = [row for row in compositions() if row.name in ROWS_OF_KINDS]
    assert len(rows) == len(ROWS_OF_KINDS)
    for row in rows:
        require_near(row, rank, references, renderer, worst)


@pytest.mark.parametrize("seed", range(12))
def test_datums_that_begin_alike_are_near_transformers_and_peft_in_float32(
    seed, rank, reference, renderer, worst
) -> None:
    """Random tries with and without images, of two models."""
    models, data = [], []
    for place, lora_rank in enumerate((8, 32)):
        own = trie_data(seed + 100 * place, renderer)
        lengths = tuple(renderer.layout(item.model_input, "datum").num_tokens for item in own)
        models.append((lora_rank, lengths))
        data.append(own)
    shares: list[int] = []
    hook = rank.base.scorer.register_forward_pre_hook(lambda _, given: shares.append(given[0].places_NK is not None))
    require_near(Composition(f"trie-{seed}", tuple(models), True), rank, (reference,), renderer, worst, data)
    hook.remove()
    assert any(shares) and rank.base.whole_below is not None, "the check in service finds the same numbers"


def test_datums_that_begin_alike_in_layers_with_states_are_near_transformers_and_peft_in_float32(
    tmp_path, worst
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    source = KINDS["Qwen3.5"](tmp_path / "model")
    rank, renderer = trainer_of(source), make_renderer(source)
    assert rank.base.whole_below is not None
    references = Reference(source), Reference(source, torch.bfloat16)
    for seed in range(1, 3):  # one behind an image; a reference of linear attention takes a minute for each
        data = [trie_data(seed + 100 * place, renderer) for place in range(2)]
        lengths = (tuple(renderer.layout(item.model_input, "datum").num_tokens for item in own) for own in data)
        models = tuple(zip((8, 32), lengths, strict=True))
        shares: list[bool] = []
        hook = rank.base.scorer.register_forward_pre_hook(
            lambda _, given, into=shares: into.append(given[0].carried is not None)
        )
        require_near(Composition(f"states-{seed}", models, True), rank, references, renderer, worst, data)
        hook.remove()
        assert any(shares) and rank.base.whole_below is not None, "the check in service finds the same numbers"


def trie_data(seed: int, renderer: Renderer) -> list[Datum]:
    """Datums of a trie of two or three levels, behind an image for odd seeds."""
    random = np.random.default_rng(seed)
    first: list[Chunk] = [image(640, 480, seed)] if seed % 2 else []
    begin: list[Chunk] = [*first, words(int(random.integers(600, 1500)), seed)]
    branches = [[*begin, words(int(random.integers(1, 400)), seed + one)] for one in range(1, 4)]
    inputs = [[*branch, words(int(random.integers(1, 150)), 7 * seed + one)] for branch in branches for one in range(3)]
    inputs += [begin, branches[0], inputs[0]]
    return [datum(prompt(*chunks), renderer, seed + number) for number, chunks in enumerate(inputs)]


def require_near(
    row: Composition,
    rank: TrainerRank,
    references: Sequence[Reference],
    renderer: Renderer,
    worst: Worst,
    data: list[list[Datum]] | None = None,
) -> None:
    """Compare log probabilities and gradients of each model of a microbatch with those of the first reference. Where
    there is a second one, which rounds too, each may be twice as far as that one's worst model. `data` instead of the
    row's own."""
    data, names = data or data_of(row, renderer), [f"m{place}" for place in range(len(row.models))]
    generator = torch.Generator().manual_seed(row.num_tokens)
    for name, (lora_rank, _) in zip(names, row.models, strict=True):
        rank.create_model(name, Trainable(rank=lora_rank, seed=len(name) + lora_rank))
        for tensor_name, tensor in lora_model(rank, name).tensors.items():
            if ".lora_B." in tensor_name:  # or a fresh adapter would add nothing
                tensor.copy_(torch.empty(tensor.shape).normal_(0, 0.02, generator=generator))
    outputs = together(rank, [(name, cross_entropy(own)) for name, own in zip(names, data, strict=True)])
    found: list[tuple[float, float, float, str]] = []
    allowed: list[tuple[float, ...]] = [(GRADIENT, MEAN, LARGEST)]
    for name, (lora_rank, lengths), own, output in zip(names, row.models, data, outputs, strict=True):
        assert isinstance(output, ForwardBackwardOutput), output
        weights = lora_model(rank, name).tensors
        truth, *others = (one.compute(lora_rank, weights, own, renderer) for one in references)
        got = [one["logprobs"] for one in output.loss_fn_outputs], gradients(rank, name)
        allowed += [tuple(AS_FAR * figure for figure in apart(*other, *truth)) for other in others]
        where = f"{row.name}, model {name} of rank {lora_rank}, datums of {lengths}; the row: {row.models}"
        found.append((*apart(*got, *truth), where))
        rank.delete_model(name)
    worst.found += found
    bounds = [max(figures) for figures in zip(*allowed, strict=True)]
    failed = [one for one in found if any(figure > bound for figure, bound in zip(one, bounds, strict=False))]
    assert not failed, f"gradient, mean and largest are to be at most {bounds}, and are {failed}"


def apart(
    logprobs: Sequence[np.ndarray],
    gradient: dict[str, torch.Tensor],
    true_logprobs: Sequence[np.ndarray],
    true_gradient: dict[str, torch.Tensor],
) -> tuple[float, float, float]:
    """Distances of the gradient, as a part of its norm, and of log probabilities: mean and largest."""
    difference = np.concatenate([np.abs(one - other) for one, other in zip(logprobs, true_logprobs, strict=True)])
    distance = relative_distance([gradient[key] for key in true_gradient], true_gradient.values())
    return distance, float(difference.mean()), float(difference.max())
