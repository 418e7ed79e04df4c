"""Settings that a base is served with: what trainer and engine compute rightly, and were compared for. The rest is
refused by name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.asked_gpus import may_divide, set_ranks
from tinker_server.backends.families.text import WITHOUT_FP8
from tinker_server.backends.formats.model_files import linear_attention, quantisation
from tinker_server.backends.formats.mxfp4 import is_in_mxfp4
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import Device, Dtype
from tinker_server.backends.protocol import BackendFailed

MOST_RANKS = 64
"""Ranks of an engine, and of a trainer that compute a microbatch together, up to which all numbers are tried."""
_LATENTS = (512, 64)
"""Numbers of a latent, and of the rotated part of keys, that all of vLLM's kernels take."""
_ALIGNED = 8
"""Numbers of 16 bytes in bfloat16: torch's grouped product takes rows of multiples of them."""
_UNDIVIDED = "experts that stay in mxfp4 (setting backend.base_precision) have not been compared on several ranks"
_DIVIDED = {
    "num_attention_heads": "heads",
    "intermediate_size": "inner numbers of an MLP",
    "moe_intermediate_size": "inner numbers of an expert",
    "shared_expert_intermediate_size": "inner numbers of a shared expert",
    "moe_shared_expert_intermediate_size": "inner numbers of a shared expert",
    "linear_num_key_heads": "heads of keys in linear attention",
    "linear_num_value_heads": "heads of values in linear attention",
    "mamba_num_heads": "heads of Mamba2",
    "n_groups": "groups of Mamba2",
}
"""Counts in a config that the ranks of an engine divide."""


@dataclass(frozen=True)
class Support:
    """A base, and the settings and the device that it would be served with."""

    renderer: Renderer
    config: BackendConfig
    device: Device
    source: str
    """The operator's name of the files, for errors."""

    def check(self) -> None:
        """Raise BackendFailed for the first setting that is not supported with this base."""
        for setting, value, reason, instead in self._settings():
            if reason is not None:
                raise BackendFailed(
                    f"{self.source}: {setting} {value} (setting backend.{setting}) is not supported: {reason};"
                    f" {instead}"
                )

    def _settings(self) -> Iterator[tuple[str, object, str | None, str]]:
        """Yield each setting that needs support: its value, the reason why it has none or None, and what to do."""
        config = self.config
        ranks, slices = config.tensor_parallel or 1, config.context_parallel
        yield "dtype", self.dtype, self._reason_unaligned(), "serve a model of other widths"
        yield "tensor_parallel", ranks, self._reason_undivided(ranks), "leave it out"
        yield "context_parallel", slices, self._reason_unsliced(slices), "set it to 1"
        if config.base_copies == 1:
            yield "base_copies", 1, self._reason_unshared(), "set it to 2"
        if config.base_precision is not None:
            yield "base_precision", config.base_precision, self._reason_unpacked(), "leave it out"
        if config.replay_routing:
            unseen = f"nobody has compared replayed routers of {self.renderer.config.architectures[0]} with its engine"
            yield "replay_routing", True, unseen if self.renderer.family.has_state_space else None, "leave it off"

    @property
    def dtype(self) -> Dtype:
        """The precision. Raises BackendFailed for a precision that the engine does not have."""
        chosen = self.config.dtype
        if self.device == "cpu" and self.renderer.family.needs_bfloat16_on_cpu:
            if chosen == "float32":
                raise BackendFailed(
                    f"{self.source}: on the CPU the engine has its linear attention in bfloat16 alone; leave dtype at"
                    " auto"
                )
            return "bfloat16"
        if chosen != "auto":
            return chosen
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def tensor_parallels(self) -> tuple[int, ...]:
        """Numbers of ranks that an engine can have."""
        return tuple(ranks for ranks in range(1, MOST_RANKS + 1) if self._reason_undivided(ranks) is None)

    @property
    def context_parallels(self) -> tuple[int, ...]:
        """Numbers of a trainer's ranks that can compute a microbatch together."""
        return tuple(ranks for ranks in range(1, MOST_RANKS + 1) if self._reason_unsliced(ranks) is None)

    @property
    def makes_fp8(self) -> bool:
        """True if files that are not quantised are quantised as they are read."""
        return self.config.base_precision == "fp8" and quantisation(self.renderer.config) is None

    @property
    def can_be_shared(self) -> bool:
        """True if trainer and engine can map the same copy of the base; unless it is asked for, only where a GPU has
        seen it."""
        is_asked = self.config.base_copies == 1
        was_seen = self.dtype == "bfloat16" and not self.config.cluster
        return self._reason_unshared() is None and (is_asked or was_seen)

    @property
    def can_keep_latents(self) -> bool:
        """True if engines keep latents in place of whole keys and values. They make matrices of one that is then not
        to be packed, and on a CPU vLLM would neither cut prompts nor find their beginnings in its cache."""
        text_config = self.renderer.config.get_text_config()
        shape = tuple(getattr(text_config, field, None) for field in ("kv_lora_rank", "qk_rope_head_dim"))
        has_latents = self.renderer.family.has_latent_attention and shape == _LATENTS
        return has_latents and self.device == "cuda" and self.config.base_precision is None

    def _reason_unaligned(self) -> str | None:
        """Return the reason why torch cannot multiply by all experts in a kernel, or None."""
        text_config = self.renderer.config.get_text_config()
        is_in_kernel = self.device == "cuda" and self.dtype == "bfloat16"
        if not is_in_kernel or not getattr(text_config, "num_experts_per_tok", 0):
            return None
        inner = "moe_intermediate_size" if hasattr(text_config, "moe_intermediate_size") else "intermediate_size"
        for field in ("hidden_size", inner):
            if (width := getattr(text_config, field)) % _ALIGNED:
                return f"its {field} is {width}, and that of a mixture of experts has to be a multiple of {_ALIGNED}"
        return None

    def _reason_unshared(self) -> str | None:
        """Return the reason why trainer and engine cannot share a copy of the base, or None."""
        config = self.config
        if (parallel := config.tensor_parallel or 1) > 1:
            if not may_divide(config):
                return (
                    f"with backend.tensor_parallel {parallel} trainer and engine have one divided copy, on the same"
                    " GPUs of one machine, which has no second engine"
                )
            if (ranks := set_ranks(config) or parallel) != parallel:
                return f"each of {ranks} ranks of the trainer would map what one of {parallel} of the engine has"
        if self.renderer.family.unshared is not None and config.base_precision != "mxfp4":
            return self.renderer.family.unshared
        if self.device == "cpu" and self.renderer.family.has_linear_attention:
            return "on the CPU the engine packs the weights of linear attention anew"
        return None

    def _reason_undivided(self, ranks: int) -> str | None:
        """Return the reason why an engine of so many ranks would compute the base wrongly, or not at all, or None."""
        if ranks == 1:
            return None
        vision, text_config = self.renderer.family.vision, self.renderer.config.get_text_config()
        if self.config.base_precision == "mxfp4":
            return _UNDIVIDED
        if vision is not None and self.config.train_vision:
            return "with backend.train_vision the engine's ranks would map a tower's adapters to other images"
        counts = [(getattr(text_config, field, None) or 0, what) for field, what in _DIVIDED.items()]
        if vision is not None and vision.is_divided:
            tower = self.renderer.config.vision_config
            counts += [
                (tower.num_attention_heads, "heads of the vision tower"),
                (tower.intermediate_size, "inner numbers of the vision tower"),
            ]
        if (reason := _not_divisible(counts, ranks)) is not None:
            return reason
        key_heads = text_config.num_key_value_heads
        can_repeat = ranks % key_heads == 0 and self.renderer.family.repeats_key_heads
        if key_heads % ranks and not can_repeat:
            return f"its key heads ({key_heads}) can be neither divided nor repeated evenly"
        return None

    def _reason_unsliced(self, ranks: int) -> str | None:
        """Return the reason why so many ranks of a trainer cannot compute slices of a microbatch, or None."""
        if ranks == 1:
            return None
        if self.config.base_precision == "mxfp4":
            return _UNDIVIDED
        text_config = self.renderer.config.get_text_config()
        counts = [(text_config.num_attention_heads, "heads")]
        if self.renderer.family.has_linear_attention:
            shape = linear_attention(text_config)
            counts += [(shape.heads, "heads of linear attention"), (shape.channels, "channels")]
        return _not_divisible(counts, ranks)

    def _reason_unpacked(self) -> str | None:
        """Return the reason why the base cannot stay in this precision, or was not seen to train so, or None."""
        (architecture, *_) = self.renderer.config.architectures
        if self.config.base_precision == "fp8" and architecture in WITHOUT_FP8:
            return f"{architecture} has not been compared in fp8"
        if self.config.base_precision == "mxfp4" and not is_in_mxfp4(quantisation(self.renderer.config)):
            return "its files are not in mxfp4"
        if self.config.train_vision:
            return "it has not been compared with backend.train_vision"
        if self.config.base_precision == "mxfp4" and self.config.cluster:
            return "it has not been compared on several machines"
        return None


def _not_divisible(counts: Sequence[tuple[int, str]], ranks: int) -> str | None:
    """Return the first of these counts, each with what it counts, that so many ranks cannot divide, as a reason."""
    return next((f"its {count} {what} cannot be divided evenly" for count, what in counts if count % ranks), None)
