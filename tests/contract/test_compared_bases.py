"""At the start of an engine its scores of the base are compared with the trainer's."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines import fork_sampler
from tests.models import make_tiny_deepseek_v3, make_tiny_vl
from tests.sampling import sampler_config, scores_of
from tests.trainers import trainer
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.sampler import client
from tinker_server.backends.sampler.pool import SamplerPool


async def test_an_engine_starts_if_it_scores_text_and_image_as_the_trainer(
    tiny_vl: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, client.__name__)
    score_base = scores_of(trainer(tiny_vl).base.score_base())
    running = SamplerPool(sampler_config(tiny_vl, tmp_path / "scratch"), fork_sampler, score_base=score_base)
    await running.start()
    await running.stop()
    found = re.findall(r"the engine scores (a text.*) by the base (\S+) nats a token from the trainer", caplog.text)
    assert [what for what, _ in found] == ["a text", "a text behind an image"]
    assert all(0 < float(nats) < 1e-5 for _, nats in found)


async def test_an_engine_of_another_model_is_refused_at_start(tiny_vl: Path, tmp_path: Path) -> None:
    """Of the same shapes, so that nothing else tells."""
    score_base = scores_of(trainer(make_tiny_vl(tmp_path / "other", seed=1)).base.score_base())
    running = SamplerPool(sampler_config(tiny_vl, tmp_path / "scratch"), fork_sampler, score_base=score_base)
    with pytest.raises(BackendFailed) as refused:
        await running.start()
    await running.stop()
    assert re.search(r"tiny: the engine scores a text by the base [1-9]\S* nats a token", str(refused.value))
    assert f"do not compute the same model. Look at the files in {tiny_vl}" in str(refused.value)


async def test_layers_that_predict_further_tokens_are_loaded_by_neither(tmp_path: Path) -> None:
    source = make_tiny_deepseek_v3(tmp_path / "model")
    expected = trainer(source).base.score_base()
    tensors = load_file(source / "model.safetensors")
    further = {
        name.replace(".1.", ".2."): tensor.clone() for name, tensor in tensors.items() if ".layers.1." in name
    } | {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}
    save_file(tensors | further, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    found = trainer(source).base.score_base()
    assert found.logprobs == expected.logprobs
    running = SamplerPool(sampler_config(source, tmp_path / "scratch"), fork_sampler, score_base=scores_of(found))
    await running.start()
    await running.stop()


def test_tensors_of_layers_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    source = make_tiny_deepseek_v3(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}, source / "model.safetensors")
    with pytest.raises(BackendFailed, match=r"tensors that the model has not: model\.layers\.2\.eh_proj"):
        trainer(source)


def test_scores_of_a_base_differ_by_rounding_alone(tiny_text: Path) -> None:
    spec, base = sampler_config(tiny_text, Path()), trainer(tiny_text).base.score_base()
    assert len(base.token_ids) == len(base.logprobs) + 1 == 62 and not base.image
    assert len(set(base.token_ids)) == 20
    assert base.require_same_base(base, spec, "the engine")
    other = LoadCheck(base.token_ids, [one + 0.002 for one in base.logprobs])
    with pytest.raises(BackendFailed, match=r"0\.002 nats a token .* rounding in float32"):
        base.require_same_base(other, spec, "the engine")
    nothing = LoadCheck(base.token_ids, [float("nan")] * len(base.logprobs))
    with pytest.raises(BackendFailed, match="nan nats"):
        base.require_same_base(nothing, spec, "the engine")
