"""Grouped products of experts' tokens, and the count of numbers in adapters of experts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests.models import FAMILIES
from tests.trainers import LORA, config
from tinker_server.backends.families.coverage import check_coverage
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.lora import grouped
from tinker_server.backends.trainer.rank import TrainerRank


def left_unwritten(left_RS: Tensor, right_SN: Tensor, offs: Tensor) -> Tensor:
    """Like torch's grouped product, which leaves the memory of groups without rows uninitialised."""
    found = torch.full((len(offs), left_RS.shape[0], right_SN.shape[1]), torch.nan)
    begin = 0
    for expert, end in enumerate(offs.tolist()):
        if end > begin:
            found[expert] = left_RS[:, begin:end] @ right_SN[begin:end]
        begin = end
    return found


@pytest.mark.parametrize("counts", [[3, 0, 4, 0], [0, 0, 5, 2], [0, 0, 0, 0], [1, 2, 3, 4]])
def test_an_expert_without_tokens_has_no_gradient(counts, monkeypatch):
    monkeypatch.setattr(grouped, "_in_one_kernel", lambda x: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", left_unwritten)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(sum(counts), width, generator=generator) for width in (3, 5))
    total, before = torch.ones(4, 3, 5), torch.ones(4, 3, 5)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    grouped._add_grouped_product(total, left, right, ends)
    for expert, (rows, others) in enumerate(zip(left.split(counts), right.split(counts), strict=True)):
        torch.testing.assert_close(total[expert], before[expert] + rows.T @ others)


@pytest.mark.parametrize("layout", ["own", "service"])
@pytest.mark.parametrize("train_vision", [False, True], ids=["", "with its tower"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_planned_size_of_an_adapter_is_its_size(kind, train_vision, layout, tmp_path):
    source = FAMILIES[kind](tmp_path / "model")
    model_config = AutoConfig.from_pretrained(source)
    family = find_family(model_config, str(source))
    if train_vision and (family.vision is None or family.vision.lora is None):
        pytest.skip("has no tower that can be trained")
    numbers = check_coverage(family, model_config, str(source), train_vision=train_vision)
    rank = TrainerRank(replace(config(source), trains_vision=train_vision), World(0, 1, torch.device("cpu")))
    rank.create_model("m", LORA.model_copy(update={"train_vision": train_vision, "layout": layout}))
    planned = LORA.rank * numbers.of_layout(layout)
    assert sum(parameter.numel() for parameter in rank.models["m"].parameters) == planned
