"""Nemotron-H: layers of Mamba2, of attention without rotation, of MLPs and of experts, each alone in its layer.

Experts have two matrices, with a squared ReLU between them, and a shared expert beside them. The router adds a
correction to the sigmoids by which it chooses, not to the weights.
"""

import math

from torch import nn
from transformers import PretrainedConfig

from tinker_server.backends.formats.model_files import quantisation, require_fields
from tinker_server.backends.patches import Patch, require_as_written

ARCHITECTURE = "NemotronHForCausalLM"
ROUTER = "model.layers.*.mixer.gate"
MIXER = Patch(
    "mamba2-time-steps",
    "transformers.models.nemotron_h.modeling_nemotron_h:NemotronHMamba2Mixer",
    (  # of transformers 5.17, and of 5.19, which warns of a setting
        "e3ad35ce6cc2b678b33e99dde03957de66b1f75ad9551665b3c4adf4730aaf97",
        "3f38e2df5babb276a8d549905fa7509daf413aa6845987a20fcbf0dfce013f17",
    ),
    "Its scan is given `time_step_limit`, which is set anew.",
    how="relied on",
)


def require_known(config: PretrainedConfig, source: str) -> None:
    """Raise BackendFailed, naming the config's field, for what the engine or transformers passes over without a
    word."""
    fields = {
        "n_shared_experts": (config.n_shared_experts, 1),
        "moe_latent_size": (config.moe_latent_size, None),
        "mlp_hidden_act": (config.mlp_hidden_act, "relu2"),
        "mamba_hidden_act": (config.mamba_hidden_act, "silu"),
        "time_step_limit": (tuple(config.time_step_limit), (0.0, math.inf)),
        "sliding_window": (config.sliding_window, None),
        "tie_word_embeddings": (config.tie_word_embeddings, False),
        "quantization_config": (quantisation(config), None),
    }
    require_fields(ARCHITECTURE, fields, source, "is not supported, only with {known}")


def unlimit_time_steps(model: nn.Module) -> None:
    """Let time steps of Mamba2 be as short as they are. transformers makes those longer that are below the config's
    `time_step_min`, which is meant for their initial values; the engine has no limit."""
    for mixer in [module for module in model.modules() if type(module).__name__ == "NemotronHMamba2Mixer"]:
        require_as_written([MIXER])
        vars(mixer)["time_step_limit"] = (0.0, math.inf)
