"""The changes inside vLLM that kinds of models need, for the engine's process alone: it imports vLLM."""

from torch import nn

from backends.families.deepseek_v3.engine import set_latent_norms
from backends.families.gemma.engine import add_head
from backends.families.gpt_oss.engine import lay_out_experts


def patch_kinds() -> None:
    """Apply the changes, once, before a model is made."""
    add_head()
    lay_out_experts()


def correct_kinds(model: nn.Module) -> None:
    """Apply the changes to a model that was loaded."""
    set_latent_norms(model)
