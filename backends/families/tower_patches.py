"""The methods of transformers' vision towers that are replaced in a model, and the code that they were written
for."""

from tinker_server.backends.patches import Patch
from tinker_server.backends.protocol import BackendFailed

_FEATURES = "What the frozen tower makes of an image is cached by content."
_EMBED = "The embedding of patches as one product: as nn.Conv3d it takes nine tenths of the tower's time on a GPU."
_ATTEND = "All images of a pass in one kernel, not one call for each image in each layer."
_QWEN = "transformers.models.{0}.modeling_{0}:{1}"


def _qwen(module: str, name: str, embed: str, features: tuple[str, str]) -> list[Patch]:
    """`features`: transformers 5.16 and 5.17, then 5.18 and 5.19."""
    return [
        Patch(f"image-features {name}", _QWEN.format(module, f"{name}Model.get_image_features"), features, _FEATURES),
        Patch(
            f"patch-embedding {name}",
            _QWEN.format(module, f"{embed}PatchEmbed.forward"),
            "cebb24a164dd178ff3e858cf3230951a6532583574f4f4b27f765ef17a818b83",
            _EMBED,
        ),
        Patch(
            f"tower-attention {name}",
            _QWEN.format(module, f"{name}VisionAttention.forward"),
            "3a6ef1eb496468f0e5e3787dee42560b907e7a768400c684928de8bc4c5a693a",
            _ATTEND,
            device="cuda",
        ),
    ]


_DEEP = (
    "74dcc7ec12620bc895f5f80f4170162b592695f37c199f88dde08ba85ebb51b4",
    "91e8d63a6209d9423105e56278dcb184216d7c297d83db838d39583e37dc51c9",
)
_QWEN3_5 = (
    "62d62fff7aa7373673b0b80c23c2486859083f5a4c7522af8f8590b398353e62",
    "0f80fd3a194673ebe80b9fba592896142ef367c8ffe7fd0e1e28d8fa0af3f265",
)
PATCHES = [
    *_qwen("qwen3_vl", "Qwen3VL", "Qwen3VLVision", _DEEP),
    *_qwen("qwen3_vl_moe", "Qwen3VLMoe", "Qwen3VLMoeVision", _DEEP),
    *_qwen("qwen3_5", "Qwen3_5", "Qwen3_5Vision", _QWEN3_5),
    *_qwen("qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeVision", _QWEN3_5),
    *_qwen(
        "qwen2_5_vl",
        "Qwen2_5_VL",
        "Qwen2_5_Vision",
        (
            "b7c8281a19a1257e88b500ba872c27e4113884abf7bd2777a9034e92b20bbbf6",
            "0f80fd3a194673ebe80b9fba592896142ef367c8ffe7fd0e1e28d8fa0af3f265",
        ),
    ),
    Patch(
        "image-features SmolVLM",
        "transformers.models.smolvlm.modeling_smolvlm:SmolVLMModel.get_image_features",
        "ed0f799c795111b71b5be9a7f884d67001ae1bcd93fa8c0ba1a6fd10d4eb3cf3",
        _FEATURES,
    ),
    Patch(
        "image-features Idefics3",
        "transformers.models.idefics3.modeling_idefics3:Idefics3Model.get_image_features",
        "e4dd0d4bdcd12ac8030b30a807d4474450629b513813307fcf6c648e11fda3b3",
        _FEATURES,
    ),
    Patch(
        "image-features Gemma3",
        "transformers.models.gemma3.modeling_gemma3:Gemma3Model.get_image_features",
        "221a944b7894c8baba329575e32a2c2dcd6ea45a0a3e2ef982b3202488c8d757",
        _FEATURES,
    ),
    Patch(
        "image-features InternVL",
        "transformers.models.internvl.modeling_internvl:InternVLModel.get_image_features",
        "b0d01d4c9390bbb883d6afd13fce390995adad1342fa7328f1de769c3fc0aa07",
        _FEATURES,
    ),
]
_BY_TARGET = {patch.target: patch for patch in PATCHES}


def tower_patch(owner: object, method: str) -> Patch:
    """Return the patch of a method of an object of transformers'. Raises BackendFailed for a class that has none."""
    target = f"{type(owner).__module__}:{type(owner).__qualname__}.{method}"
    if target not in _BY_TARGET:
        raise BackendFailed(f"{target} is not among the methods that are replaced here: this model is not supported")
    return _BY_TARGET[target]
