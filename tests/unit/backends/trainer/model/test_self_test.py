"""Checks of a trainer at start."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from tests.models import make_tiny_of
from tests.trainers import config
from tinker_server.backends.families.logits import LogitTransform
from tinker_server.backends.inputs.rendering import Rendered
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer import base_model
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.lora.linear import SUMMED_TOKENS, add_product, split_sum
from tinker_server.backends.trainer.model import self_test
from tinker_server.backends.trainer.model.packing import Microbatch, Sample, pack
from tinker_server.backends.trainer.model.self_test import OwnScores, packing_is_exact, require_whole_products
from tinker_server.backends.trainer.rank import TrainerRank

CPU = torch.device("cpu")


def start(source: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    TrainerRank(replace(config(source), dtype=dtype), World(0, 1, CPU))


@pytest.mark.parametrize("wrong", [LogitTransform(), LogitTransform(scale=0.98 / 1.05, cap=1000.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("cohere", {"logit_scale": 0.95}),
        ("granite", {"logits_scaling": 1.05}),
        ("gemma2", {"final_logit_softcapping": 30.0, "attn_logit_softcapping": None}),
    ],
)
def test_a_model_that_scales_or_caps_its_logits_is_refused_however_little_it_does_where_that_is_not_known(
    kind: str,
    sizes: dict[str, Any],
    dtype: Literal["float32", "bfloat16"],
    wrong: LogitTransform,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They differ by 0.01 to 0.07 nats on average, which in bfloat16 is not far from rounding."""
    source = make_tiny_of(kind, tmp_path / "model", **sizes)
    if kind != "cohere":  # whose head takes no adapters in the engine
        start(source, dtype)
        monkeypatch.setattr(self_test, "logit_transform", lambda _: wrong)
    with pytest.raises(BackendFailed, match="ForCausalLM is not supported: it does more with its decoder's output"):
        start(source, dtype)


def started(source: Path, dtype: Literal["float32", "bfloat16"], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a trainer; return with what it called `packing_is_exact`."""
    seen: list[Any] = []

    def note(*asked: Any) -> bool:
        seen.append(asked)
        return True

    monkeypatch.setattr(base_model, "packing_is_exact", note)
    start(source, dtype)
    return seen[0]


@pytest.mark.parametrize(("dtype", "allowed", "refused"), [("float32", 1e-4, 0.002), ("bfloat16", 0.05, 0.15)])
def test_scores_that_are_a_little_off_for_every_token_are_distinguished_from_rounding(
    dtype: Literal["float32", "bfloat16"],
    allowed: float,
    refused: float,
    tiny_text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scorer, renderer, own, device = started(tiny_text, dtype, monkeypatch)

    def moved(nats: float) -> OwnScores:
        return OwnScores(*([one + nats for one in scores] for scores in (own.exact, own.rounded)))

    assert packing_is_exact(scorer, renderer, moved(allowed), device)
    with pytest.raises(BackendFailed, match=r"differ by 0\.\d+ nats on average"):
        packing_is_exact(scorer, renderer, moved(refused), device)
    own.exact[1][0] = torch.nan
    with pytest.raises(BackendFailed, match="differ by nan nats"):
        packing_is_exact(scorer, renderer, own, device)


def amplifying(source: Path, directory: Path, factor: int) -> Path:
    """Write a model whose logits are so many times as large, and so what rounding makes of them."""
    model = Qwen3ForCausalLM.from_pretrained(source)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(factor * model.lm_head.weight.detach())
    found: Path = shutil.copytree(source, directory / "model")
    model.save_pretrained(found)
    return found


def test_a_model_that_amplifies_rounding_is_allowed_what_it_makes_of_it_and_no_fault(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer, renderer, own, device = started(amplifying(tiny_text, tmp_path, 60), "bfloat16", monkeypatch)
    assert packing_is_exact(scorer, renderer, own, device)
    with pytest.raises(BackendFailed, match="nats on average"):  # so it was the noise that allowed it
        packing_is_exact(scorer, renderer, OwnScores(own.exact, own.exact), device)
    norm = scorer.model.get_decoder().layers[1].post_attention_layernorm.weight
    with torch.no_grad():
        norm.mul_(1.25)
    with pytest.raises(BackendFailed, match="nats on average"):
        packing_is_exact(scorer, renderer, own, device)


@pytest.mark.parametrize("factor", [1, 60])
def test_texts_that_attend_to_each_other_are_not_packed_even_if_a_model_amplifies_rounding(
    factor: int, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer, renderer, own, device = started(amplifying(tiny_text, tmp_path, factor), "bfloat16", monkeypatch)
    assert packing_is_exact(scorer, renderer, own, device)

    def pack_as_one(samples: Sequence[Sample], *rest: Any) -> Microbatch:
        tokens = np.concatenate([rendered.token_ids_T for rendered, _ in samples])
        return pack([(Rendered(tokens, [], []), np.concatenate([targets for _, targets in samples]))], *rest)

    monkeypatch.setattr(self_test, "pack", pack_as_one)
    assert not packing_is_exact(scorer, renderer, own, device)


def test_complete_products_over_tokens_let_the_trainer_start():
    require_whole_products([3, 16], CPU)


@pytest.mark.parametrize(("lost", "of"), [(1, 1), (2, 2), (3, 3)])
def test_a_product_that_drops_the_last_tokens_stops_the_trainer_at_start(lost, of, monkeypatch):
    """Lost as in cuBLAS: the tokens left for a last step of 64."""

    def losing(total_RN: Tensor, left_TR: Tensor, right_TN: Tensor) -> None:
        num_tokens = len(left_TR) - (lost if len(left_TR) % 64 == of else 0)
        add_product(total_RN, left_TR[:num_tokens], right_TN[:num_tokens])

    monkeypatch.setattr(self_test, "add_product", losing)
    torch.manual_seed(0)  # the lost numbers of three outputs add up to nothing once in 27 times
    with pytest.raises(BackendFailed, match=f"a product of {4096 + of} tokens, rank 8 and 3 outputs lacks the last"):
        require_whole_products([3], CPU)


def test_no_long_product_ends_with_a_few_tokens_of_a_step():
    """cuBLAS loses 1 to 3 of them; tests/gpu/test_kernels.py tries its kernels."""
    for num_tokens in range(1, 5 * SUMMED_TOKENS):
        found = split_sum(num_tokens)
        assert [token for tokens in found for token in range(tokens.start, tokens.stop)] == list(range(num_tokens))
        lengths = [tokens.stop - tokens.start for tokens in found]
        assert all(length % SUMMED_TOKENS not in (1, 2, 3) or length <= 3 for length in lengths), num_tokens
