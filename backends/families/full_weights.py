"""The parameters of a model that trains all its weights, and which of a request's flags each belongs to."""

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from backends.families.family import LoraFlag


def trained_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """By name, each once: all of the decoder with its embeddings, and the head. Nothing of a vision tower."""
    parts: list[nn.Module] = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    trained = {id(one) for part in parts for one in part.parameters()}
    return {name: one for name, one in model.named_parameters() if id(one) in trained}


def flag_of(name: str, model: PreTrainedModel, modules: Mapping[LoraFlag, list[str]]) -> LoraFlag | None:
    """Which flag trains a parameter: that of the modules beside which it stands, such as a norm of an attention's
    queries; a tied embedding is the head's. None for what trains always: embeddings and the norms between them.

    `modules` are the full names of those that each flag trains.
    """
    parameter = model.get_parameter(name)
    if any(parameter is one for one in model.get_output_embeddings().parameters()):
        return "train_unembed"
    flags: tuple[LoraFlag, ...] = ("train_attn", "train_mlp")
    for flag in flags:
        parents = {module.rpartition(".")[0] for module in modules[flag]}
        if any(name.startswith(f"{parent}.") for parent in parents):
            return flag
    return None
