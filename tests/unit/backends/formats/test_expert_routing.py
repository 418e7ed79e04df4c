"""Files of expert routing, and router replay."""

import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from vllm.outputs import CompletionOutput

from tests.factories import MIXED, cross_entropy, datum, image, make_renderer, present, prompt, succeeded, words
from tests.models import FAMILIES, make_tiny_moe
from tests.ranks import Stepped, check_two_are_as_one, two_steps
from tests.trainers import (
    LORA,
    OWNER,
    assert_same,
    assert_same_gradients,
    config,
    forward_backward,
    gradients,
    logprobs,
    lora_model,
    perturb,
    reference_logprobs,
    together,
    trainer,
)
from tests.tries import random_trie, text_of
from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk, TokenRun
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.formats.expert_routing import (
    NamedSequence,
    RoutingFiles,
    identities,
    read_routing,
    read_sequence,
    routing_name,
)
from tinker_server.backends.inputs.rendering import Layout, Renderer
from tinker_server.backends.protocol import BackendFailed, InvalidInput
from tinker_server.backends.sampler.engine.vllm_patches.routed_experts import keep_routing
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.model.router_replay import UNKNOWN
from tinker_server.backends.trainer.model.routing import identify_with_routing
from tinker_server.backends.trainer.model.shared_prefixes import count_common
from tinker_server.backends.trainer.rank import TrainerRank
from tinker_server.backends.trainer.step.whole_check import WholeCheck

TEXTS = [prompt(words(length, length)) for length in (5, 11, 23)]
TINY_VL = Path(__file__).parents[4] / "tinker_server/tiny_vl"
KINDS = ("Qwen3 MoE", "Qwen3-VL MoE", "Qwen2 MoE", "Mixtral", "DeepSeek-V3")


def make(kind: str, directory: Path) -> Path:
    """A mixture with experts so large that a token's routing matters."""
    FAMILIES[kind](directory)
    for path in directory.glob("*.safetensors"):
        tensors = {name: one * (8 if ".experts." in name else 1) for name, one in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    return directory


def replaying(source: Path, directory: Path, **settings: Any) -> TrainerRank:
    """A rank with a trained adapter."""
    rank = TrainerRank(replace(config(source), routing_dir=directory, **settings), World(0, 1, torch.device("cpu")))
    rank.create_model("m", LORA)
    perturb(rank, "m")
    return rank


def data_of(renderer: Renderer) -> list[Datum]:
    inputs = MIXED.values() if renderer.takes_images else TEXTS
    return [datum(one, renderer, seed) for seed, one in enumerate(inputs)]


def experts_of(renderer: Renderer, length: int, seed: int = 0) -> np.ndarray:
    """[T, L, K], any experts, none twice."""
    sizes = renderer.config.get_text_config()
    rows = length * sizes.num_hidden_layers
    every = np.tile(np.arange(sizes.num_experts_per_tok + 2), (rows, 1))
    chosen = np.random.default_rng(seed).permuted(every, axis=1)[:, : sizes.num_experts_per_tok]
    return chosen.reshape(length, sizes.num_hidden_layers, -1).astype(np.uint8)


def keep(files: RoutingFiles, renderer: Renderer, item: Datum, seed: int, owner: str = OWNER) -> np.ndarray:
    rendered = renderer.render(item.model_input, "datum")
    experts_TLK = experts_of(renderer, len(rendered.token_ids_T), seed)
    files.write(routing_name(owner, "m", rendered), experts_TLK)
    return experts_TLK


def test_the_oldest_files_are_deleted_first_and_an_earlier_process_s_files_count(tmp_path: Path) -> None:
    experts_TLK = np.zeros((100, 2, 5), np.uint8)
    files = RoutingFiles(tmp_path, max_bytes=3500)
    for name in ("a", "b", "c"):
        files.write(name, experts_TLK)
    files.write("a", experts_TLK + 1)  # now the newest
    RoutingFiles(tmp_path, max_bytes=3500).write("d", experts_TLK)
    assert read_routing(tmp_path, "b") is None
    assert {path.name for path in tmp_path.iterdir()} == {"a", "c", "d"}
    np.testing.assert_array_equal(read_routing(tmp_path, "a"), experts_TLK + 1)


def test_a_sequence_is_kept_once_under_both_names_and_deleted_with_them(tmp_path: Path) -> None:
    experts_TLK = np.zeros((100, 2, 5), np.uint8)

    def write(files: RoutingFiles, number: int) -> None:
        files.write(f"t{number}", experts_TLK + number, NamedSequence(f"s{number}", np.arange(101), 7))

    files = RoutingFiles(tmp_path, max_bytes=5000)
    for number in (1, 2):
        write(files, number)
    for number in (1, 2):
        of_sequence_TLK, sequence = present(read_sequence(tmp_path, f"s{number}"))
        np.testing.assert_array_equal(of_sequence_TLK, experts_TLK + number)
        np.testing.assert_array_equal(read_routing(tmp_path, f"t{number}"), experts_TLK + number)
        assert (sequence.num_prompt, sequence.tokens_S.tolist()) == (7, [*range(101)])
    assert sum(path.lstat().st_size for path in tmp_path.iterdir()) < 5000
    write(RoutingFiles(tmp_path, max_bytes=5000), 3)
    assert read_sequence(tmp_path, "s1") is None and read_routing(tmp_path, "t1") is None
    write(RoutingFiles(tmp_path, max_bytes=5000), 4)
    assert {path.name for path in tmp_path.iterdir()} == {"t2", "s3", "t3", "s4", "t4"}, (
        "a name goes with the next file"
    )
    files.write("s3", experts_TLK)  # as an earlier server has written it
    np.testing.assert_array_equal(read_routing(tmp_path, "t3"), experts_TLK)
    assert read_sequence(tmp_path, "s3") is None


def test_several_processes_write_to_one_directory_and_neither_spoils_what_another_has_begun(tmp_path: Path) -> None:
    experts_TLK = np.ones((100, 2, 5), np.uint8)
    RoutingFiles(tmp_path, writer="0").write("a", experts_TLK)
    begun = RoutingFiles(tmp_path, writer="1")
    (tmp_path / "aside1").write_bytes(b"half of a file")
    later = RoutingFiles(tmp_path, max_bytes=1200, writer="0")  # which counts the files that are whole
    later.write("b", experts_TLK)
    assert read_routing(tmp_path, "a") is None
    assert (tmp_path / "aside1").read_bytes() == b"half of a file"
    begun.write("c", experts_TLK)
    np.testing.assert_array_equal(read_routing(tmp_path, "c"), experts_TLK)


def test_a_process_that_starts_again_deletes_no_files_of_others_that_live(tmp_path: Path) -> None:
    experts = np.zeros((100, 1, 1), np.uint8)
    most = 40 * (experts.nbytes + 128)

    def names(writer: str) -> set[str]:
        return {path.name for path in tmp_path.glob(f"{writer}*")}

    writers = {writer: RoutingFiles(tmp_path, most, writer) for writer in "xy"}
    for number in range(40):
        for writer, files in writers.items():
            files.write(f"{writer}{number:02}", experts)
    again = RoutingFiles(tmp_path, most, "y")
    assert len(names("x")) == len(names("y")) == 40
    for number in range(40, 60):  # in place of the twenty oldest
        again.write(f"y{number:02}", experts)
    assert names("x") == {f"x{number:02}" for number in range(10, 40)}
    assert names("y") == {f"y{number:02}" for number in range(10, 60)}


def test_a_name_depends_on_user_model_tokens_and_images() -> None:
    renderer = make_renderer(TINY_VL)
    rendered = {name: renderer.render(one, name) for name, one in MIXED.items()}
    text = rendered["text"]
    names = [routing_name("u", "m", one) for one in rendered.values()]
    names += [routing_name("u", "n", text), routing_name("v", "m", text), routing_name("um", "", text)]
    other = replace(rendered["one image"], images=rendered["image last"].images)
    names += [routing_name("u", "m", text, [7]), routing_name("u", "m", text, [8]), routing_name("u", "m", other)]
    assert len(set(names)) == len(names)
    longer = replace(text, token_ids_T=np.append(text.token_ids_T, 7))
    assert routing_name("u", "m", text, [7]) == routing_name("u", "m", longer)


@pytest.mark.parametrize("kind", KINDS)
def test_without_files_routers_choose_as_always(kind: str, tmp_path: Path) -> None:
    source = make(kind, tmp_path / "model")
    rank, plain = replaying(source, tmp_path / "routing"), trainer(source)
    plain.create_model("m", LORA)
    perturb(plain, "m")
    batch = cross_entropy(data_of(make_renderer(source)))
    found, expected = (forward_backward(one, "m", batch, True) for one in (rank, plain))
    assert present(found).metrics["replayed_tokens:sum"] == 0
    assert "replayed_tokens:sum" not in present(expected).metrics
    for got, wanted in zip(present(found).loss_fn_outputs, present(expected).loss_fn_outputs, strict=True):
        np.testing.assert_allclose(got["logprobs"], wanted["logprobs"], atol=1e-6)
    assert_same(gradients(rank, "m"), gradients(plain, "m"), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_routing_gives_what_transformers_computes_with_these_experts(kind: str, tmp_path: Path) -> None:
    source = make(kind, tmp_path / "model")
    renderer, files = make_renderer(source), RoutingFiles(tmp_path / "routing")
    data = data_of(renderer)
    kept = {index: keep(files, renderer, data[index], index) for index in (1, 2)}
    keep(files, renderer, data[0], 0, owner="somebody else")
    rank = replaying(source, tmp_path / "routing")
    rank.create_model("m", LORA)  # which adds nothing
    output = forward_backward(rank, "m", cross_entropy(data), False)
    assert present(output).metrics["replayed_tokens:sum"] == sum(map(len, kept.values()))
    kind_of_model = AutoModelForImageTextToText if renderer.takes_images else AutoModelForCausalLM
    model = kind_of_model.from_pretrained(source).eval()
    for index, (item, row) in enumerate(zip(data, present(output).loss_fn_outputs, strict=True)):
        with torch.no_grad():
            own = reference_logprobs(renderer, item, model)[:, 0].numpy()
        wanted = own
        if index in kept:
            with torch.no_grad(), forced(model, kept[index]):
                wanted = reference_logprobs(renderer, item, model)[:, 0].numpy()
            assert np.abs(wanted - own).max() > 1e-2
        np.testing.assert_allclose(row["logprobs"], wanted, atol=1e-4)


def test_datums_share_a_beginning_as_far_as_its_routing_is_the_same(tmp_path: Path) -> None:
    """Of seven with the same 160 tokens, three have one routing, two another, and two none that is known."""
    source = make("Qwen3-VL MoE", tmp_path / "model")
    renderer, files = make_renderer(source), RoutingFiles(tmp_path / "routing")
    begin = (words(20, 1), image(160, 160, 1), words(140, 2))
    data = [datum(prompt(*begin, words(30 + seed, 9 + seed)), renderer, seed) for seed in range(7)]
    num_common = len(renderer.render(prompt(*begin), "prompt").token_ids_T)
    for seed, (item, routing) in enumerate(zip(data, (0, 0, 0, 1, 1), strict=False)):
        rendered = renderer.render(item.model_input, "datum")
        experts_TLK = experts_of(renderer, len(rendered.token_ids_T), 50 + seed)
        experts_TLK[:num_common] = experts_of(renderer, num_common, routing)
        files.write(routing_name(OWNER, "m", rendered), experts_TLK)
    rank = replaying(source, tmp_path / "routing", max_tokens_per_microbatch=4096)
    outputs, found = [], []
    for whole_below in (0, None):
        assert rank.base.whole_below == 0
        rank.base.whole_below = whole_below
        outputs.append(present(forward_backward(rank, "m", cross_entropy(data), True)))
        found.append(gradients(rank, "m"))
        lora_model(rank, "m").clear_gradient()
        rank.base.whole_below = 0
    shared, whole = outputs
    assert shared.metrics["shared_tokens:sum"] == 4 * num_common and "shared_tokens:sum" not in whole.metrics
    assert shared.metrics["replayed_tokens:sum"] == whole.metrics["replayed_tokens:sum"] > 5 * num_common
    for row, wanted in zip(shared.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(row["logprobs"], wanted["logprobs"], atol=1e-5)
    assert_same_gradients(found[0], found[1])


def test_datums_are_compared_whole_with_the_experts_that_they_had_if_their_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = make("Qwen3 MoE", tmp_path / "model")
    renderer, files = make_renderer(source), RoutingFiles(tmp_path / "routing")
    data = [datum(prompt(words(150, 1), words(length, length)), renderer, length) for length in (30, 40, 50)]
    for item in data:  # all begin alike, in their experts too
        experts_TLK = experts_of(renderer, 200)[: len(item.loss_fn_inputs["target_tokens"])]
        files.write(routing_name(OWNER, "m", renderer.render(item.model_input, "datum")), experts_TLK)
    rank = replaying(source, tmp_path / "routing", max_tokens_per_microbatch=4096)
    compare, compared = WholeCheck._logprobs_apart, list[torch.Tensor]()

    def note(self: WholeCheck, trie: Any, logprobs_NK: torch.Tensor, whole_NK: torch.Tensor) -> str | None:
        compared.append((logprobs_NK - whole_NK).abs().max())
        return compare(self, trie, logprobs_NK, whole_NK)

    def require_same(*given: Any) -> None:
        shutil.rmtree(tmp_path / "routing")
        own_require_same(*given)

    own_require_same = WholeCheck.require_same
    monkeypatch.setattr(WholeCheck, "_logprobs_apart", note)
    monkeypatch.setattr(WholeCheck, "require_same", require_same)
    output = present(forward_backward(rank, "m", cross_entropy(data), True))
    assert not (tmp_path / "routing").exists() and "computed whole from now on" not in caplog.text
    assert len(compared) == 1 and compared[0] < 1e-5
    num_tokens = sum(len(item.loss_fn_inputs["target_tokens"]) for item in data)
    assert output.metrics["replayed_tokens:sum"] == num_tokens
    assert output.metrics["shared_tokens:sum"] == 2 * 150


def test_random_tries_with_replayed_routing_have_the_numbers_of_whole_datums(tmp_path: Path) -> None:
    """All of a trie have the same experts at the same place; some have others from a place on, and some none."""
    source = make("Qwen3-VL MoE", tmp_path / "model")
    renderer, files = make_renderer(source), RoutingFiles(tmp_path / "routing")
    rank = replaying(source, tmp_path / "routing", max_tokens_per_microbatch=8192, max_context_length=4096)
    num_shared = 0.0
    for seed in range(4):
        random, data = np.random.default_rng(seed), []
        for number, tokens in enumerate(random_trie(seed)):
            data.append(datum(prompt(text_of(tokens)), renderer, number))
            experts_TLK = experts_of(renderer, 2000, seed)[: len(tokens)].copy()
            if number % 3 == 1:
                place = random.integers(0, len(tokens))
                experts_TLK[place:] = experts_of(renderer, 2000, 10 + number)[: len(tokens) - place]
            if number % 4 != 2:
                rendered = renderer.render(data[-1].model_input, "datum")
                files.write(routing_name(OWNER, "m", rendered), experts_TLK)
        outputs, found = [], []
        for whole_below in (0, None):
            rank.base.whole_below = whole_below
            outputs.append(present(forward_backward(rank, "m", cross_entropy(data), True)))
            found.append(gradients(rank, "m"))
            lora_model(rank, "m").clear_gradient()
        for row, wanted in zip(*(output.loss_fn_outputs for output in outputs), strict=True):
            np.testing.assert_allclose(row["logprobs"], wanted["logprobs"], atol=1e-5)
        assert_same_gradients(found[0], found[1])
        num_shared += outputs[0].metrics.get("shared_tokens:sum", 0)
    assert num_shared > 0


def test_the_routing_of_an_image_is_the_same_as_a_whole_or_not_at_all() -> None:
    renderer = make_renderer(TINY_VL)
    rendered = renderer.render(prompt(words(4, 1), image(64, 64, 1), words(9, 2)), "datum")
    (span,), num_tokens = rendered.spans, len(rendered.token_ids_T)
    layout = Layout(num_tokens, rendered.spans)
    first = np.random.default_rng(0).integers(0, 9, (num_tokens, 2, 3))
    other, unlike = first.copy(), first.copy()
    other[span.offset + span.num_tokens - 1] += 1
    unlike[-3] += 1
    routings: list[np.ndarray | None] = [first, first.copy(), other, unlike, None, np.full(first.shape, UNKNOWN)]
    found = identify_with_routing([identities(rendered)] * 6, [layout] * 6, routings.__getitem__)
    common = [count_common(found[0], one) for one in found]
    assert common == [num_tokens, num_tokens, span.offset, num_tokens - 3, 0, 0]
    assert count_common(found[4], found[5]) == num_tokens
    assert ((found[0] < 0) == (identities(rendered) < 0)).all()


@contextmanager
def forced(model, experts_TLK: np.ndarray) -> Iterator[None]:
    """Inside, transformers' routers choose these experts [T, L, K]."""

    def choose(experts_TK, router, inputs, output):
        logits_TE = inputs[0].flatten(0, -2) @ router.weight.T
        has_sigmoid = type(router).__name__.startswith("DeepseekV3")
        scores_TE = logits_TE.sigmoid() if has_sigmoid else logits_TE.softmax(-1)
        weights_TK = torch.stack([row[chosen] for row, chosen in zip(scores_TE, experts_TK, strict=True)])
        if getattr(router, "norm_topk_prob", True):
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return output[0], (1.8 if has_sigmoid else 1) * weights_TK, experts_TK

    hooks = [
        module.register_forward_hook(partial(choose, torch.from_numpy(experts_TLK[:, index].astype(np.int64))))
        for index, layer in enumerate(model.get_decoder().layers)
        for module in layer.modules()
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter"))
    ]
    assert hooks
    yield
    for hook in hooks:
        hook.remove()


def test_gradients_pass_through_the_replayed_experts(tmp_path: Path) -> None:
    """The derivative of the loss along the adapter's gradient equals autograd's."""
    source = make("Qwen3 MoE", tmp_path / "model")
    renderer, files = make_renderer(source), RoutingFiles(tmp_path / "routing")
    data = data_of(renderer)
    for index, item in enumerate(data):
        keep(files, renderer, item, index)
    rank = replaying(source, tmp_path / "routing")

    def loss() -> float:
        return present(forward_backward(rank, "m", cross_entropy(data), False)).metrics["loss:sum"]

    forward_backward(rank, "m", cross_entropy(data), True)
    found = gradients(rank, "m")
    norm = torch.stack([(one.double() ** 2).sum() for one in found.values()]).sum().sqrt().item()
    step, values = 1e-3, []
    tensors = lora_model(rank, "m").tensors
    for sign in (1, -2):
        for name, tensor in tensors.items():
            tensor.add_(found[name], alpha=sign * step / norm)
        values.append(loss())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(norm, rel=1e-2)


def test_models_in_one_microbatch_have_each_its_own_routing(tmp_path: Path) -> None:
    source = make("Qwen3 MoE", tmp_path / "model")
    renderer, files = make_renderer(source), RoutingFiles(tmp_path / "routing")
    data = data_of(renderer)
    keep(files, renderer, data[1], 1)
    rank = replaying(source, tmp_path / "routing", shares_microbatches=True)
    rank.create_model("n", LORA)
    batch = cross_entropy(data)
    alone = [forward_backward(rank, name, batch, False) for name in ("m", "n")]
    for got, wanted in zip(together(rank, [("m", batch), ("n", batch)], False), alone, strict=True):
        assert succeeded(got).metrics["replayed_tokens:sum"] == present(wanted).metrics["replayed_tokens:sum"]
        for row, expected in zip(succeeded(got).loss_fn_outputs, present(wanted).loss_fn_outputs, strict=True):
            np.testing.assert_allclose(row["logprobs"], expected["logprobs"], atol=1e-5)
    assert [present(one).metrics["replayed_tokens:sum"] for one in alone] == [
        len(data[1].loss_fn_inputs["target_tokens"]),
        0,
    ]


NUMBERS = {"first": 0, "second": 0, "third": 2}
"""Of the continuation of each request: another engine has drawn the third's others."""


def run(part: Literal["prompt", "sampled"], request_id: str, length: int, offset: int = 0) -> TokenRun:
    """Of the continuation of a request."""
    sequence_id = f"{request_id}:{NUMBERS.get(request_id, 0)}"
    return TokenRun(part=part, sequence_id=sequence_id, offset=offset, length=length)


@pytest.fixture
def two_turns(tmp_path: Path) -> tuple[TrainerRank, Renderer, Datum, dict[str, np.ndarray]]:
    """A rank, its renderer, a datum of 5 tokens with 4 and 3 that were sampled, and the experts [T, L, K] of two
    requests: `first` has sampled the 4, and `second` the 3 behind all before. A third has the tokens of the first, and
    other experts."""
    source = make("Qwen3 MoE", tmp_path / "model")
    renderer, files, kept = make_renderer(source), RoutingFiles(tmp_path / "routing"), {}
    beginning, own = np.arange(1, 6), np.arange(11, 18)
    for seed, (request_id, num_prompt, end) in enumerate((("first", 5, 9), ("second", 9, 12), ("third", 5, 9))):
        tokens = np.concatenate([beginning, own])[:end]
        experts_TLK = kept[request_id] = experts_of(renderer, end - 1, seed)
        rendered = renderer.render(prompt(EncodedTextChunk(tokens=tokens[:num_prompt])), "prompt")
        output = CompletionOutput(0, "", tokens[num_prompt:].tolist(), None, None, experts_TLK)
        keep_routing(files, (OWNER, "m", request_id), rendered, [output], NUMBERS[request_id])
    whole = prompt(EncodedTextChunk(tokens=np.concatenate([beginning, own])))
    return replaying(source, tmp_path / "routing"), renderer, datum(whole, renderer), kept


def found_by(
    two_turns: tuple[TrainerRank, Renderer, Datum, dict[str, np.ndarray]], *runs: TokenRun, owner: str = OWNER
) -> np.ndarray | None:
    rank, renderer, item, _ = two_turns
    replay = present(rank.base.router_replay)
    return replay.find(owner, "any model", renderer.render(item.model_input, "datum"), runs)


def test_runs_of_named_sequences_have_the_experts_of_these_sequences(two_turns: Any) -> None:
    """Also where another sequence has the same tokens. A sequence's last token was not sent anywhere."""
    kept = two_turns[-1]
    for request_id in ("first", "third"):
        runs = [run("prompt", request_id, 5), run("sampled", request_id, 4), run("sampled", "second", 3)]
        experts_TLK = present(found_by(two_turns, *runs))
        np.testing.assert_array_equal(experts_TLK[:8], kept[request_id])
        np.testing.assert_array_equal(experts_TLK[9:11], kept["second"][9:])
        assert (experts_TLK[[8, 11]] == UNKNOWN).all()
    runs = [run("prompt", "second", 2), run("prompt", "second", 7, 2), run("sampled", "second", 3)]
    of_second = present(found_by(two_turns, *runs))
    np.testing.assert_array_equal(of_second[:11], kept["second"])


def test_sequences_that_are_not_known_leave_their_runs_to_the_router(two_turns: Any) -> None:
    runs = [run("prompt", "second", 9), run("sampled", "gone", 3)]
    experts_TLK = present(found_by(two_turns, *runs))
    np.testing.assert_array_equal(experts_TLK[:9], two_turns[-1]["second"][:9])
    assert (experts_TLK[9:] == UNKNOWN).all()
    assert found_by(two_turns, *runs, owner="somebody else") is None
    assert found_by(two_turns, run("prompt", "gone", 12)) is None


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        ([run("prompt", "first", 4, 1), run("sampled", "second", 8)], "4 tokens from 0 on are not the prompt tokens"),
        ([run("prompt", "first", 9), run("sampled", "second", 3)], "9 tokens from 0 on are not the prompt tokens"),
        ([run("prompt", "second", 9), run("sampled", "second", 3, 1)], "3 tokens from 9 on are not the sampled tokens"),
    ],
)
def test_runs_of_other_tokens_than_the_sequences_are_refused_by_name(
    two_turns: Any, runs: list[TokenRun], named: str
) -> None:
    rank, _, item, _ = two_turns
    wrong = item.model_copy(update={"model_input_spans": runs})
    with pytest.raises(InvalidInput, match=f"datum 1: model_input_spans: the {named} of the sequence"):
        logprobs(rank, [item, wrong])
    logprobs(rank, [item])


def test_runs_that_do_not_cover_the_input_are_refused(two_turns: Any) -> None:
    rank, _, item, _ = two_turns
    short = item.model_copy(update={"model_input_spans": [run("prompt", "gone", 9)]})
    with pytest.raises(InvalidInput, match="datum 1: model_input_spans cover 9 tokens, model_input has 12"):
        logprobs(rank, [item, short])


def test_the_tokens_of_known_sequences_are_counted_and_replayed(two_turns: Any) -> None:
    rank, _, item, _ = two_turns
    rank.create_model("n", LORA)
    runs = [run("prompt", "second", 9), run("sampled", "second", 3)]
    named = item.model_copy(update={"model_input_spans": runs})
    outputs = [present(forward_backward(rank, "n", cross_entropy([one]), False)) for one in (item, named)]
    assert [output.metrics["replayed_tokens:sum"] for output in outputs] == [0, 11]
    own, replayed = (output.loss_fn_outputs[0]["logprobs"] for output in outputs)
    assert np.abs(own - replayed).max() > 1e-3


@pytest.mark.parametrize("spoilt", [b"", b"no array", np.lib.format.magic(1, 0) + b"x"])
def test_a_damaged_file_counts_as_absent(spoilt: bytes, tmp_path: Path, caplog) -> None:
    source = make("Qwen3 MoE", tmp_path / "model")
    renderer, files = make_renderer(source), RoutingFiles(tmp_path / "routing")
    item = datum(TEXTS[0], renderer)
    keep(files, renderer, item, 0)
    (file,) = (tmp_path / "routing").iterdir()
    file.write_bytes(spoilt)
    rank = replaying(source, tmp_path / "routing")
    assert present(forward_backward(rank, "m", cross_entropy([item]), False)).metrics["replayed_tokens:sum"] == 0
    assert "cannot read a file of expert routing" in caplog.text


def test_a_sample_does_not_fail_if_its_routing_cannot_be_written(tmp_path: Path, caplog) -> None:
    renderer, files = make_renderer(TINY_VL), RoutingFiles(tmp_path / "routing")
    shutil.rmtree(tmp_path / "routing")
    rendered = renderer.render(TEXTS[0], "prompt")
    experts_TLK = np.zeros((len(rendered.token_ids_T) + 2, 2, 3), np.uint8)
    output = CompletionOutput(0, "", [5, 6, 7], None, None, experts_TLK)
    keep_routing(files, (OWNER, "m", "r"), rendered, [output])
    assert "dropping the expert routing of a sample" in caplog.text
    with pytest.raises(BackendFailed, match="the engine returned the experts of 6 tokens where 7 were due"):
        keep_routing(files, (OWNER, "m", "r"), rendered, [replace(output, routed_experts=experts_TLK[:6])])


def replaying_rank(world: World, source: Path, directory: Path) -> Stepped:
    rank = TrainerRank(replace(config(source, 30, num_ranks=world.size), routing_dir=directory), world)
    rank.create_model("m", LORA)
    return two_steps(rank, "m", cross_entropy(data_of(make_renderer(source))))


@pytest.mark.slow
def test_two_ranks_are_as_one(tmp_path: Path) -> None:
    source = make("Qwen3 MoE", tmp_path / "model")
    renderer, files = make_renderer(source), RoutingFiles(tmp_path / "routing")
    for index, item in enumerate(data_of(renderer)[1:]):
        keep(files, renderer, item, index)
    check_two_are_as_one(replaying_rank, source, tmp_path / "routing")


@pytest.mark.parametrize(
    ("spoil", "words_of_it"),
    [
        (lambda experts: experts[1:], "were due"),
        (lambda experts: experts[:, :1], "were due"),
        (lambda experts: experts + 100, "to experts up to 1"),
    ],
)
def test_routing_of_another_model_is_refused_by_name(
    spoil: Callable[[np.ndarray], np.ndarray], words_of_it: str, tmp_path: Path
) -> None:
    source = make("Qwen3 MoE", tmp_path / "model")
    renderer, files = make_renderer(source), RoutingFiles(tmp_path / "routing")
    item = datum(TEXTS[0], renderer)
    rendered = renderer.render(item.model_input, "datum")
    files.write(routing_name(OWNER, "m", rendered), spoil(experts_of(renderer, len(rendered.token_ids_T))))
    rank = replaying(source, tmp_path / "routing")
    with pytest.raises(BackendFailed, match=words_of_it):
        logprobs(rank, [item])
    logprobs(rank, [datum(TEXTS[1], renderer)])


def test_replay_is_refused_by_name_for_routers_of_sigmoids(tmp_path: Path) -> None:
    source = FAMILIES["Nemotron-3"](tmp_path / "model")
    given = BackendConfig(models={"a": str(source)}, replay_routing=True, device="cpu", scratch_dir=tmp_path / "s")
    with pytest.raises(
        BackendFailed, match=r"replay_routing True .* nobody has compared replayed routers of NemotronHForCausalLM"
    ):
        describe_models(given, Machine(8 << 30))


def test_replay_is_refused_if_no_model_has_experts_and_skipped_for_those_without(tmp_path: Path) -> None:
    dense, mixture = FAMILIES["Llama"](tmp_path / "dense"), make_tiny_moe(tmp_path / "mixture")
    given = BackendConfig(models={"dense": str(dense)}, replay_routing=True, device="cpu", scratch_dir=tmp_path / "s")
    with pytest.raises(BackendFailed, match="none of the models is a mixture of experts"):
        describe_models(given, Machine(8 << 30))
    both = given.model_copy(update={"models": {"dense": str(dense), "mixture": str(mixture)}})
    described = describe_models(both, Machine(8 << 30))
    assert described["dense"].spec.routing_dir is None
    assert described["mixture"].spec.routing_dir is not None


def test_what_tells_datums_apart_does_not_grow_with_a_models_layers() -> None:
    num_datums, num_tokens, random, peaks = 40, 100, np.random.default_rng(0), []
    for num_layers in (4, 94):
        experts = random.integers(0, 128, (num_datums, num_tokens, num_layers, 8)).astype(np.int16)
        given = [np.arange(num_tokens)] * num_datums, [Layout(num_tokens, [])] * num_datums
        tracemalloc.start()
        found = np.concatenate(identify_with_routing(*given, experts.__getitem__))
        peaks.append(tracemalloc.get_traced_memory()[1] / len(found))
        tracemalloc.stop()
        assert len(set(found.tolist())) == num_datums * num_tokens, "no two tokens have the same experts"
    assert peaks[1] < peaks[0] + 100, "bytes of a token; its experts in 94 layers are 1,504"
