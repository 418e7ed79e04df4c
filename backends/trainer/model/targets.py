"""The internals of torch and transformers that the trainer's model changes or relies on."""

from tinker_server.backends.patches import Patch

KEEP_MATERIALIZED = Patch(
    "recompute-materialized",
    "torch._functorch.config:ban_recompute_materialized_backward",
    "703e7deb8069da13cde0288a4683f8f8e9e6b76b3e8ac0b868ba48e3b58c15e6",
    "Norms and silu(gate) * up are recomputed in backward: a quarter less memory, 1 % more time.",
    device="cuda",
)
KEEP_FAR_APART = Patch(
    "recompute-far-apart",
    "torch._functorch.config:ban_recompute_used_far_apart",
    "c56f2f82d6c12e73e81359b5123fc8f68dab756aa36a3aa4c2b313d24cdbf91f",
    "As recompute-materialized.",
    device="cuda",
)
KEEP_NOT_ALLOWED = Patch(
    "recompute-concatenations",
    "torch._functorch.config:ban_recompute_not_in_allowlist",
    "f7a34e3e6cc47b990bd551b5d90a371acb6c9f8ff4f092db6c9855748a327ab4",
    "Rotated queries and keys, which hold a concatenation, are recomputed; not where there are experts.",
    device="cuda",
)
KEEP_OPERATORS = Patch(
    "recompute-no-router",
    "torch._functorch.config:is_non_builtin_to_include",
    "1c04c5a749c36a24e055cc53769ebc789f1a31d92630f1217001dfb54b7e1e85",
    "A router's choice is not recomputed: it could be another where two experts are equal.",
    device="cuda",
)
MOST_COMPILED = Patch(
    "compiled-kinds-of-layers",
    "torch._dynamo.config:recompile_limit",
    "d19376c156e77957aa3bc1aa7215860be1ab3330126f3a2a4cea38914474a27c",
    "A class of layers is compiled for each of its kinds, with and without a gradient, images and adapters; beyond the"
    " limit it would run uncompiled.",
    device="cuda",
)
CHECKPOINTED_LAYER = Patch(
    "recomputed-layers",
    "transformers.modeling_layers:GradientCheckpointingLayer.__call__",
    (
        "a43cf00d92f4fabbe75bdc871de268cf4fb91829175038cb1997dd32465e7507",
        "fc3498519abb71c41012e2dd90b5bfbd2ee0163ae1372bbdfb664b9719f667d7",
    ),
    "A layer recomputes by `_gradient_checkpointing_func` while `gradient_checkpointing` and `training` are set.",
    how="relied on",
)
SET_PARAMETER = Patch(
    "loaded-parameters",
    "transformers.core_model_loading:set_param_for_module",
    "7ce94b61f97a48bb14cc7c5af8256d8a619f62a85c0be858b8ba0e4582a976d6",
    "A parameter that was read has `_is_hf_initialized`, and is set in its module by setattr.",
    how="relied on",
)
DTYPE_PLAN = Patch(
    "own-precision",
    "transformers.modeling_utils:PreTrainedModel._get_dtype_plan",
    "01c7b5a94dbfbefcda177627fc0ac0181d97bd3432e676a244a8d2183aa39052",
    "Small tensors of linear attention are rounded to the model's precision, where published files and the engine have"
    " them in float32.",
)
PATCHES = [patch for patch in vars().values() if isinstance(patch, Patch)]
