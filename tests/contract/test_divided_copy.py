"""One copy of the base, divided: each rank of an engine holds a part, and the trainer's ranks compute with these.

pytest -m slow tests/contract/test_divided_copy.py
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines import fork_sampler
from tests.factories import MIXED, cross_entropy, datum, image, make_renderer, present, prompt, words
from tests.models import DIVIDED, DIVIDED_IN_FP8, make_tiny_text, make_tiny_vl, publish_in_fp8
from tests.ranks import on_ranks, two_steps
from tests.sampling import Reference, assert_close, sample, sampler_config, scoring
from tests.servers import Server
from tests.specs import held
from tests.trainers import LORA, trained
from tinker_server.backends.base_weights.client import BaseWeights
from tinker_server.backends.base_weights.mapped import Files, _ask
from tinker_server.backends.model_spec import Dtype, Mesh, ModelSpec
from tinker_server.backends.processes.launcher import launch_trainer
from tinker_server.backends.protocol import BackendFailed, ignore_loading
from tinker_server.backends.sampler.engine.engine import stays_packed
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

pytestmark = pytest.mark.slow
KINDS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "Qwen3": (make_tiny_text, 2),
    "Qwen3-VL": (make_tiny_vl, 2),
    "Qwen3-VL, tied": (partial(make_tiny_vl, tie=True), 2),
    **{kind: made for kind, made in DIVIDED.items() if kind != "gpt-oss"},
}
IN_BFLOAT16 = ("Qwen3-Next", "Qwen3.5 MoE")
"""Kinds that the engine has on the CPU in bfloat16 alone."""
OWN = ("mixer.A_log",)
"""What the trainer reads for itself."""


def spec_of(source: Path, kind: str, num_ranks: int, tmp_path: Path) -> ModelSpec:
    dtype: Dtype = "bfloat16" if kind in IN_BFLOAT16 else "float32"
    for path in source.glob("*.safetensors") if kind in IN_BFLOAT16 else ():  # as models are published
        tensors = {name: one.bfloat16() if one.dtype == torch.float32 else one for name, one in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    spec = replace(sampler_config(source, tmp_path / "scratch"), dtype=dtype, max_context_length=1024)
    return replace(spec, tensor_parallel=num_ranks, mesh=Mesh(shard=num_ranks))


def assert_divided(spec: ModelSpec) -> None:
    """Every tensor of the files is held: whole, or its parts by several ranks, as all matrices of linears are."""
    with Files(Path(spec.directory), getattr(torch, spec.dtype), stays_packed(spec)) as files:
        names = {name for name in files.names() if not name.endswith(OWN)}
    for rank in spec.base_gpus:
        found = _ask(spec.base_socket(rank), torch.device("cpu"))
        assert {*found.views, *found.parts} == names
        assert {name for name in names if name.endswith(("o_proj.weight", "down_proj.weight"))} <= {*found.parts}


def steps(world: World, spec: ModelSpec) -> tuple[list[list[np.ndarray]], dict[str, torch.Tensor]]:
    rank, renderer = TrainerRank(spec, world), make_renderer(Path(spec.directory))
    inputs = [*MIXED.values()] if renderer.takes_images else [prompt(words(20 + seed, seed)) for seed in range(5)]
    batch = cross_entropy([datum(one, renderer, seed) for seed, one in enumerate(inputs)])
    trained(rank, {"m": LORA})
    return two_steps(rank, "m", batch)


@pytest.mark.usefixtures("holder_here")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_map_parts_train_as_ranks_with_shards_of_their_own(kind: str, tmp_path: Path) -> None:
    make, num_ranks = KINDS[kind]
    assert_trains_alike(spec_of(make(tmp_path / "model"), kind, num_ranks, tmp_path), tmp_path)


@pytest.mark.usefixtures("holder_here")
@pytest.mark.parametrize("form", ["published", "made at load", "read"])
@pytest.mark.parametrize("kind", DIVIDED_IN_FP8)
def test_ranks_that_map_parts_in_fp8_train_as_ranks_with_shards_of_their_own(
    kind: str, form: Literal["published", "made at load", "read"], tmp_path: Path
) -> None:
    make, num_ranks = DIVIDED_IN_FP8[kind]
    source = make(tmp_path / "model")
    if form != "made at load":
        source = publish_in_fp8(source, tmp_path / "published")
    spec = spec_of(source, kind, num_ranks, tmp_path)
    precision: Literal["fp8"] | None = None if form == "read" else "fp8"
    assert_trains_alike(replace(spec, base_precision=precision, is_quantised=form != "made at load"), tmp_path)


def assert_trains_alike(spec: ModelSpec, tmp_path: Path) -> None:
    dividing = held(spec, tmp_path / "base")
    assert_divided(dividing)
    found = on_ranks(spec.tensor_parallel, steps, dividing)
    wanted = on_ranks(spec.tensor_parallel, steps, spec)
    for (scores, adapter), (own_scores, own_adapter) in zip(found, wanted, strict=True):
        for of_step, own_of_step in zip(scores, own_scores, strict=True):
            for one, own in zip(of_step, own_of_step, strict=True):
                np.testing.assert_allclose(one, own, rtol=0, atol=1e-5)
        assert adapter.keys() == own_adapter.keys()
        for name, tensor in adapter.items():
            torch.testing.assert_close(tensor, own_adapter[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.usefixtures("holder_here")
def test_a_part_with_other_numbers_than_the_files_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinker_server.backends.sampler.engine.weight_holder import WeightHolder

    loads = WeightHolder.load_model

    def load_and_spoil(holder: WeightHolder) -> None:
        loads(holder)
        if holder._seat[0] == 1:
            for name, parameter in holder._loaded.named_parameters():
                if name.endswith("down_proj.weight"):
                    parameter.data.neg_()

    monkeypatch.setattr(WeightHolder, "load_model", load_and_spoil)
    dividing = held(spec_of(make_tiny_text(tmp_path / "model"), "Qwen3", 2, tmp_path), tmp_path / "base")
    with pytest.raises(BackendFailed, match=r"down_proj.weight: the shared copy differs from the file at .*"):
        on_ranks(2, steps, dividing)


async def test_an_engine_of_two_ranks_computes_with_what_it_maps_and_outlives_a_dead_holder(tmp_path: Path) -> None:
    make, num_ranks = KINDS["Qwen3-VL"]
    spec = replace(spec_of(make(tmp_path / "model"), "Qwen3-VL", num_ranks, tmp_path), kv_cache_bytes=128 << 20)
    renderer = make_renderer(Path(spec.directory))
    reference, text = Reference(Path(spec.directory), renderer, {"small": 4}), prompt(words(40, 5), image(64, 64, 1))
    base = BaseWeights(replace(spec, base_copies=1))
    trainer = TrainerClient(base.spec, base.wrap_start(launch_trainer))
    sampler = SamplerPool(base.spec, base.wrap_start(fork_sampler, they_wait=True))
    supervisors = [base._supervisor, trainer._supervisor, sampler.engines[0].supervisor]

    async def assert_right(model_id: str) -> None:
        found = (await sample(sampler, scoring(text), None)).prompt_logprobs
        assert_close(present(found), reference.prompt_logprobs(text))
        model = await trainer.create_model(model_id, LORA, "owner")
        output = await trainer.forward_backward(model, cross_entropy([datum(text, renderer)]), backward=False)
        await trainer.delete_model(model)
        wanted = reference.logprobs_TV(text, [], None)
        ids = datum(text, renderer).loss_fn_inputs["target_tokens"]
        rows = np.arange(len(ids))
        np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"], wanted.numpy()[rows, ids], atol=1e-4)

    try:
        await asyncio.gather(base.start(ignore_loading), trainer.start(), sampler.start())
        await assert_right("before")
        before = [child.process.pid for one in supervisors for child in one.children]
        assert len(before) == 2 + 2 + 1
        restarts = base._supervisor.processes()[0].restarts
        os.kill(before[1], signal.SIGKILL)
        async with asyncio.timeout(120):
            await base._supervisor.wait_for_restart(restarts)
        await assert_right("after")
        assert not {*before} & {child.process.pid for one in supervisors for child in one.children}
    finally:
        await asyncio.gather(trainer.stop(), sampler.stop())
        await base.stop()


def test_a_server_with_a_divided_copy_samples_what_it_trained(tmp_path: Path) -> None:
    """Here all processes are forks of what a server imports; an engine's ranks are spawned by such a fork."""
    from tinker import types

    options = ("--device", "cpu", "--ranks", "2", "--tensor-parallel", "2", "--base-copies", "1")
    server = Server(tmp_path / "data", {"tiny": make_tiny_vl(tmp_path / "model")}, *options).start()
    try:
        training = server.client().create_lora_training_client("tiny", rank=8, seed=1).result()
        targets = types.TensorData.from_numpy(np.array([2, 3, 4]))
        tokens = types.ModelInput.from_ints([1, 2, 3])
        data = [types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets})]
        for _ in range(2):
            training.forward_backward(data, "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        sampling = training.save_weights_and_get_sampling_client().result()
        trained_T = training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        sampled_T = sampling.compute_logprobs(types.ModelInput.from_ints([1, 2, 3, 4])).result()[1:]
        np.testing.assert_allclose(np.asarray(sampled_T, np.float64), trained_T, atol=1e-3)
    finally:
        assert server.stop() == 0, server.log.read_text()[-4000:]
