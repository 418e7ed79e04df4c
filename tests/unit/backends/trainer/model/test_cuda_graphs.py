"""Microbatches that graphs take, and their inputs and outputs; their kernels are tested in `tests/gpu`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.factories import cross_entropy, datum, make_renderer, present, prompt, succeeded, words
from tests.models import FAMILIES
from tests.trainers import LORA, OWNER, assert_same, config, forward_backward, gradients, perturb, together
from tinker_server.backends.families.text import Text
from tinker_server.backends.formats.expert_routing import RoutingFiles, routing_name
from tinker_server.backends.inputs.rendering import Rendered
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.lora.model import LoraModel
from tinker_server.backends.trainer.model import cuda_graphs as graphs_module
from tinker_server.backends.trainer.model.cuda_graphs import Graphs, samples_of_graph
from tinker_server.backends.trainer.model.packing import Microbatch, pack
from tinker_server.backends.trainer.model.recompute import Memory, Recomputation
from tinker_server.backends.trainer.model.token_logprobs import Scorer, TokenGradient
from tinker_server.backends.trainer.rank import TrainerRank


def of_lengths(lengths: list[int]) -> Microbatch:
    texts = [np.zeros(length, np.int64) for length in lengths]
    return pack([(Rendered(text, [], []), text) for text in texts], Text(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "num_samples"),
    [
        ([64] * 4, 256, 32),
        ([8] * 32, 256, 32),
        ([7] * 32, 256, None),
        ([7] * 31, 256, 32),
        ([32] * 63, 2048, 64),
        ([32] * 64, 2048, 64),
        ([31] * 64, 2048, 256),
        ([8] * 256, 2048, 256),
        ([64] * 64, 4096, 64),
        ([63] * 64, 4096, None),
        ([63] * 63, 4096, 64),
        ([4095], 4096, 64),
    ],
)
def test_a_graph_has_room_for_a_microbatchs_samples_and_for_padding(lengths, num_tokens, num_samples) -> None:
    """Tokens that are in no sample stay uninitialised."""
    assert samples_of_graph(of_lengths(lengths), num_tokens) == num_samples


class Recorded:
    """Replaces a CUDA graph: replay runs again what ran while it was captured."""

    under_way: "Recorded | None" = None

    def __init__(self) -> None:
        self.replay: Callable[[], None] = lambda: None


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only forward and backward of a microbatch are captured, so they replace their kernels."""

    @contextmanager
    def graph(one: Recorded, pool: object) -> Iterator[None]:
        Recorded.under_way = one
        yield
        Recorded.under_way = None

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    for name, value in {
        "CUDAGraph": Recorded,
        "graph": graph,
        "graph_pool_handle": lambda: None,
        "Stream": Stream,
        "stream": lambda _: nullcontext(),
        "current_stream": Stream,
        "empty_cache": lambda: None,
        "memory_snapshot": lambda _: [],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    scored, backward = Scorer.forward, torch.Tensor.backward
    outputs: dict[int, torch.Tensor] = {}

    def compute(scorer: Scorer, batch: Microbatch, scales_TR: torch.Tensor) -> torch.Tensor:
        """Attention on the CPU reads the host's cu_seqlens, on CUDA the device's."""
        known = batch.cu_seqlens.unique_consecutive()
        return scored(scorer, replace(batch, cu_seqlens=known, cu_seqlens_host=known), scales_TR)

    def forward(
        scorer: Scorer, batch: Microbatch, scales_TR: torch.Tensor, gradient: TokenGradient | None = None
    ) -> torch.Tensor:
        if gradient is not None:
            return scored(scorer, batch, scales_TR, gradient)
        found = compute(scorer, batch, scales_TR)
        if (graph := Recorded.under_way) is not None:

            def again() -> None:
                with torch.enable_grad():
                    outputs[id(found)] = compute(scorer, batch, scales_TR)
                found.data.copy_(outputs[id(found)].detach())

            graph.replay = again
        return found

    def back(tensor: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        if (graph := Recorded.under_way) is not None:
            graph.replay = lambda: backward(outputs[id(tensor)], gradient)
        backward(tensor, gradient)

    monkeypatch.setattr(Scorer, "forward", forward)
    monkeypatch.setattr(torch.Tensor, "backward", back)


@pytest.mark.parametrize("kind", ["Qwen3 MoE", "Llama"])
def test_microbatches_of_several_models_by_graphs_are_as_without(kind, capturing, tmp_path) -> None:
    source, routing_dir = FAMILIES[kind](tmp_path / "model"), tmp_path / "routing"
    renderer, files = make_renderer(source), RoutingFiles(routing_dir)
    settings = replace(config(source, max_tokens=4096), routing_dir=routing_dir if kind == "Qwen3 MoE" else None)
    rank, plain = (TrainerRank(settings, World(0, 1, torch.device("cpu"))) for _ in range(2))
    rank.base._graphs = graphs = Graphs(rank.base.scorer, torch.device("cpu"))
    rank.base.whole_below = plain.base.whole_below = graphs.max_tokens + 1
    for one in (rank, plain):
        for place, lora_rank in enumerate((4, 9)):
            one.create_model(f"m{place}", LORA.model_copy(update={"rank": lora_rank, "seed": place}))
            perturb(one, f"m{place}")
    for lengths in ([20, 3, 17], [5] * 31, [5] * 33, [300, 1]):
        data = [datum(prompt(words(n, n)), renderer, n) for n in lengths]
        sizes = renderer.config.get_text_config()
        if kind == "Qwen3 MoE":  # one of them by experts that it would not choose
            rendered = renderer.render(data[0].model_input, "datum")
            shape = (lengths[0], sizes.num_hidden_layers, sizes.num_experts_per_tok)
            experts_TLK = np.broadcast_to(np.arange(sizes.num_experts_per_tok, dtype=np.uint8), shape)
            files.write(routing_name(OWNER, "m0", rendered), experts_TLK)
        batches = [(f"m{place}", cross_entropy(data)) for place in range(2)]
        for backward in (True, False):
            found, wanted = (together(one, batches, backward) for one in (rank, plain))
            for of_model, expected in zip(found, wanted, strict=True):
                assert succeeded(of_model).metrics == pytest.approx(succeeded(expected).metrics, rel=1e-4)
                for row_, other in zip(
                    succeeded(of_model).loss_fn_outputs, succeeded(expected).loss_fn_outputs, strict=True
                ):
                    np.testing.assert_allclose(row_["logprobs"], other["logprobs"], atol=1e-4)
        for name, _ in batches:
            assert_same(gradients(rank, name), gradients(plain, name))
    assert rank.base._graphs is graphs
    assert {key[0] for key in graphs._graphs} == {256, 512, 768}


def test_a_graph_that_computes_something_else_is_not_used(capturing, tmp_path, monkeypatch, caplog) -> None:
    source = FAMILIES["Llama"](tmp_path / "model")
    rank = TrainerRank(config(source, max_tokens=4096), World(0, 1, torch.device("cpu")))
    rank.create_model("m", LORA)
    batch = cross_entropy([datum(prompt(words(40)), make_renderer(source))])
    expected = forward_backward(rank, "m", batch, False)
    rank.base._graphs = Graphs(rank.base.scorer, torch.device("cpu"))
    forward = graphs_module._Graph.forward
    monkeypatch.setattr(graphs_module._Graph, "forward", lambda *given: forward(*given) + 0.5)
    found = forward_backward(rank, "m", batch, False)
    np.testing.assert_array_equal(
        present(found).loss_fn_outputs[0]["logprobs"], present(expected).loss_fn_outputs[0]["logprobs"]
    )
    assert rank.base._graphs is None
    assert "0.5 nats from eager ones" in caplog.text


class Card:
    """A GPU with made-up bytes: a microbatch takes 100, and 10 a token, or 2 if all layers recompute."""

    def __init__(self, rank: TrainerRank, limit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated_bytes = self._peak_bytes = 0
        layers = rank.base.scorer.model.get_decoder().layers

        def run(num_tokens: int) -> None:
            part = sum(layer.gradient_checkpointing for layer in layers) / len(layers)
            self._peak_bytes = self.allocated_bytes + 100 + round(num_tokens * (10 - 8 * part))

        graphs = present(rank.base._graphs)

        def snapshot(pool: object) -> list[dict[str, int]]:
            return [{"total_size": 103 + 10 * max(key[0] for key in graphs._graphs), "allocated_size": 3}]

        for name, value in {
            "memory_allocated": lambda _: self.allocated_bytes,
            "max_memory_allocated": lambda _: self._peak_bytes,
            "reset_peak_memory_stats": lambda _: None,
            "memory_snapshot": snapshot,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        rank.base.memory = Memory(Recomputation(layers), run, torch.device("cpu"), limit_bytes, float)
        for name in ("missing_bytes", "training_bytes"):
            monkeypatch.setattr(LoraModel, name, 0)  # a model's own are not on this card


def test_graphs_leave_room_for_the_longest_text_and_give_way_to_it(capturing, tmp_path, monkeypatch) -> None:
    source = FAMILIES["Llama"](tmp_path / "model")
    rank = TrainerRank(config(source, max_tokens=4096, max_context_length=400), World(0, 1, torch.device("cpu")))
    renderer = make_renderer(source)
    rank.base._graphs = graphs = Graphs(rank.base.scorer, torch.device("cpu"))
    card = Card(rank, 5000, monkeypatch)
    rank.create_model("m", LORA)

    def train(length: int) -> set[int]:
        """Return the tokens of the graphs that are there afterwards."""
        present(forward_backward(rank, "m", cross_entropy([datum(prompt(words(length)), renderer)]), True))
        return {key[0] for key in graphs._graphs}

    assert train(40) == {256}
    assert present(rank.base.memory).graphs_bytes == 2660
    assert train(300) == {256}  # one of 512 tokens takes 5220, and 400 tokens need 900
    card.allocated_bytes = 1200  # 890 are left beside the graph
    assert train(40) == {256}
    assert train(390) == {256}
    assert train(400) == set()
    assert present(rank.base.memory).graphs_bytes == 0
    assert train(40) == set()  # it would leave 890 again
    card.allocated_bytes = 1190
    assert train(40) == {256}
