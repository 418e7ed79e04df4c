"""Attention of prefixes that are packed once, against that of each whole sample; kernels are plain operations in
float64."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.attention import PlainKernel, kernels_in_plain_operations, one_by_one, packed_qkv
from tests.models import make_tiny_text
from tests.tries import datums_of
from tinker_server.backends.kernels import varlen_attention as packed
from tinker_server.backends.kernels.shared_prefix import Level, levels, tables
from tinker_server.backends.kernels.varlen_attention import packed_attention
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.model import attention
from tinker_server.backends.trainer.model.attention import PACKED
from tinker_server.backends.trainer.model.shared_prefixes import Prefixes, Trie

HEADS, SIZE, SCALE = (4, 2), 8, 0.3


@pytest.fixture
def flash() -> Iterator[PlainKernel]:
    with kernels_in_plain_operations() as kernel:
        yield kernel


DATUMS = {
    "a group": datums_of((130, 20), (130, 33), (130, 1)),
    "two groups": datums_of((300, 5), (300, 40), (150, 7), (150, 8), (9,)),
    "a trie of three levels": datums_of(
        (200, 150, 9), (200, 150, 8), (200, 31), (200, 151, 140, 3), (200, 151, 140, 2)
    ),
    "long suffixes": datums_of((400, 90), (400, 91), (400, 92)),
}


def lengths_of(trie: Trie) -> list[int]:
    return [end - begin for begin, end in pairwise(trie.begins)]


def bounds_of(trie: Trie) -> Tensor:
    return torch.tensor(trie.begins, dtype=torch.int32)


@pytest.mark.parametrize(("sinks", "long", "close"), [(False, 4096, 1e-10), (True, 4096, 1e-10), (False, 16, 1e-5)])
@pytest.mark.parametrize("kind", DATUMS)
def test_a_prefix_that_is_packed_once_is_attended_to_as_in_each_whole_sample(
    kind: str, sinks: bool, long: int, close: float, flash: PlainKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of `long` tokens have a kernel call of their own, and log-sum-exps are then kept in float32."""
    monkeypatch.setattr(packed, "LONG", long)
    datums = DATUMS[kind]
    trie = Prefixes(datums).trie(range(len(datums)))
    assert trie.saved and trie.spans()
    qkv = packed_qkv(lengths_of(trie), HEADS, SIZE, seed=3)
    sinks_H = torch.linspace(-1, 1, HEADS[0], dtype=torch.float64) if sinks else None
    rows = [torch.from_numpy(trie.tokens_of(number)) for number in range(len(datums))]
    grads = [torch.randn(len(row), HEADS[0], SIZE, dtype=torch.float64) for row in rows]
    summed = torch.zeros_like(qkv[0]).index_add(0, torch.cat(rows), torch.cat(grads))

    bounds = bounds_of(trie)
    out, _ = packed_attention(
        *qkv, bounds, bounds, max(lengths_of(trie)), SCALE, None, sinks_H, None, 0, *tables(trie.spans())
    )
    found = torch.autograd.grad(out, qkv, summed)

    whole = [one[torch.cat(rows)] for one in qkv]
    lengths = [len(row) for row in rows]
    if sinks_H is None:
        expected = one_by_one(whole, lengths, SCALE)
    else:
        cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        expected, _ = packed_attention(*whole, cu, cu, max(lengths), SCALE, None, sinks_H)
    torch.testing.assert_close(out[torch.cat(rows)], expected, rtol=0, atol=close)
    wanted = torch.autograd.grad(expected, qkv, torch.cat(grads))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=close)


def test_no_prefix_is_no_level() -> None:
    bounds, table = tables([])
    assert list(levels(bounds, table)) == []
    assert len({0, 1, len(bounds), len(table)}) == 4, "code compiled for these sizes is for all"


def test_a_kernel_that_gives_other_numbers_behind_a_prefix_is_refused(
    flash: PlainKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = packed._attend_across_backward

    def wrong(grad_QHD: Tensor, saved: list[Tensor], level: Level, scale: float) -> tuple[Tensor, ...]:
        query, key, value = right(grad_QHD, saved, level, scale)
        return query, 1.3 * key, value

    monkeypatch.setattr(packed, "_attend_across_backward", wrong)
    trie = Prefixes(DATUMS["a group"]).trie(range(3))
    bounds = bounds_of(trie)
    with pytest.raises(BackendFailed, match="away from its definition on this GPU"):
        packed_attention(
            *packed_qkv(lengths_of(trie), HEADS, SIZE, seed=3), bounds, bounds, 130, SCALE, None, None, None, 0,
            *tables(trie.spans()),
        )  # fmt: skip


@pytest.mark.parametrize("compiles", [False, True])
def test_a_model_on_the_operator_of_cuda_scores_shared_texts_as_whole_ones(
    compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_flash", PlainKernel())
    attention.implementation(torch.device("cuda"), torch.bfloat16)
    source = make_tiny_text(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation=PACKED).eval()
    alone = AutoModelForCausalLM.from_pretrained(source).eval()
    compiled: list[object] = []

    def backend(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled.append(module)
        return module

    if compiles:
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.self_attn.compile(dynamic=True, backend=backend)
    datums = DATUMS["a trie of three levels"]
    wanted = [alone(input_ids=torch.from_numpy(one)[None], use_cache=False).logits[0] for one in datums]
    for trie in (Prefixes(datums[:1]).trie([0]), Prefixes(datums).trie(range(len(datums)))):
        ids = torch.from_numpy(np.concatenate([datums[one.datum][one.begin : one.end] for one in trie.segments]))
        positions = torch.cat([torch.arange(one.begin, one.end) for one in trie.segments])
        shared = tables(trie.spans()) if trie.saved else None
        extra = attention.varlen_arguments(*(bounds_of(trie),) * 2, max(lengths_of(trie)), shared=shared)
        logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **extra).logits[0]
        for number in range(len(trie.lengths)):
            torch.testing.assert_close(logits[trie.tokens_of(number)], wanted[number], rtol=0, atol=1e-4)
    assert len(compiled) == int(compiles), "layers are compiled once, with and without prefixes"
