"""The shapes of a base model, and the bytes that follow from them. Knows no machine and no setting.

Weights, adapters, slots and KV cache are exact; activations are estimates.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from tinker_server.api_schemas.training import Layout
from tinker_server.backends.families.coverage import ImageToken, LoraMatrices, Numbers, image_token
from tinker_server.backends.families.lora_names import OUT_OF_LATENTS
from tinker_server.backends.formats.model_files import (
    BYTES_PER_NUMBER,
    head_width,
    kv_bytes_per_token,
    latent_bytes_per_token,
    linear_attention,
    state_bytes_per_sequence,
)
from tinker_server.backends.model_spec import Dtype
from tinker_server.backends.trainer.model.sample_chunks import CHUNK
from tinker_server.backends.trainer.model.vision import FROZEN_VALUES, TRAINED_VALUES

TRAINED_IMAGE_TOKENS = 1024
"""Tokens of the largest image for whose backward through the vision tower there is room in any case. A larger image
needs what the microbatches leave."""
_LOGITS_BYTES = 3 << 29
"""Logits of a chunk and their gradient, whatever the vocabulary (`token_logprobs.MAX_LOGITS`): measured 1.5 GiB."""
_LEAST_KV_CACHE = {"cpu": 512 << 20, "cuda": 1 << 30}
ROW_PARALLEL = ("o_proj", "down_proj", "out_proj")
"""Linears of which the ranks of an engine divide the inputs; of the others, the outputs."""
_SLICES = {"in_proj_qkv": 3, "in_proj_qkvz": 4, "in_proj": 5}
"""Linears that the engine takes as so many, each with its own A."""
REPEATED = ("q_a_proj", "kv_a_proj_with_mqa")
"""Linears that each rank of an engine has whole."""
OF_KEYS = ("k_proj", "v_proj")
_ABSORBED = "kv_b_proj"
"""Linear of which an engine that keeps latents has two more forms, of the same size together."""
_EXPERTS = "experts"
_HEAD = "lm_head"
"""The engine's head has adapters for the whole vocabulary on every rank."""


@dataclass(frozen=True)
class ModelSize:
    """The shapes of a base model, from which all its bytes follow."""

    name: str
    number_bytes: int
    """Bytes of a number of the base, and of an engine's adapters."""
    numbers: Numbers
    hidden: int
    num_layers: int
    vocab_size: int
    layer_token_bytes: float
    """Bytes that a decoder layer saves of a token for its backward, by estimate."""
    kv_token_bytes: int
    """Bytes of a token's whole keys and values in all layers."""
    key_heads: int = 8
    """Heads of keys. If an engine has more ranks, some of these hold the same head."""
    state_bytes: int = 0
    """Bytes of a sequence's state in layers of linear attention."""
    image_token: ImageToken | None = None
    """None without images."""
    longest_context: int = 1 << 20
    """The model's own limit, in tokens."""
    can_be_captured: bool = True
    """True if a rank that has the whole base captures its layers in CUDA graphs: not those of linear attention."""
    lora_layout: Layout = "service"
    """Layout of the models for which memory is planned."""
    expert_slots: Layout = "own"
    """Form of the engine's slots for experts."""
    latent_token_bytes: int = 0
    """Bytes of a token's latents in all layers; 0 if it has none."""
    latent_cache: bool = False
    """True if engines keep latents in place of whole keys and values."""
    packed_numbers: int = 0
    """Numbers of the base that stay packed, in fp8 or MXFP4."""
    packed_bytes: int = 0
    """Bytes that they take, with their scales."""
    can_be_shared: bool = True
    """True if trainer and engine can map the same copy of the base."""
    tensor_parallels: tuple[int, ...] = (1,)
    """Numbers of ranks that an engine can have."""
    context_parallels: tuple[int, ...] = (1,)
    """Numbers of a trainer's ranks that can compute a microbatch together."""
    exchanged_token_bytes: int = 0
    """Bytes that such ranks exchange of a token in a layer's attention, as sent and as received, by estimate."""

    @property
    def base_bytes(self) -> int:
        """Bytes of a copy of the base that no ranks divide."""
        return self.numbers.base * self.number_bytes - self.packed_savings

    @property
    def packed_savings(self) -> int:
        """Bytes that a copy of the base saves by what stays in fp8."""
        return self.packed_numbers * self.number_bytes - self.packed_bytes

    @property
    def all_gathered_bytes(self) -> int:
        """Bytes of a sharded base that ranks all-gather at once, of whose layers two are packed."""
        return self.numbers.all_gathered * self.number_bytes - 2 * self.packed_savings // self.num_layers

    @property
    def unpacking_bytes(self) -> int:
        """Bytes of the largest matrix that is dequantised for a product."""
        if not self.packed_numbers:
            return 0
        largest = max(matrix.outputs * matrix.inputs for matrix in self.numbers.matrices if not matrix.in_tower)
        return largest * self.number_bytes

    @property
    def trains_tower(self) -> bool:
        """True if models may train the vision tower."""
        return any(matrix.in_tower for matrix in self.numbers.matrices)

    def tower_bytes(self, num_tokens: int) -> int:
        """Return what the images of a microbatch take before the decoder computes, or after its backward, if they are
        all of its tokens: their features, and the largest call of the tower."""
        if (token := self.image_token) is None:
            return 0
        if self.trains_tower:  # each call is recomputed for its backward, alone; features have a gradient
            at_once = max(TRAINED_VALUES // token.pixels, TRAINED_IMAGE_TOKENS)
            return 2 * num_tokens * token.features + min(num_tokens, at_once) * token.backward
        return num_tokens * token.features + min(num_tokens, FROZEN_VALUES // token.pixels) * token.forward

    def adapter_numbers(self, rank: int) -> int:
        """Return the numbers of an adapter that trains everything."""
        return self.numbers.of_layout(self.lora_layout) * rank

    def slot_bytes(self, rank: int, tensor_parallel: int = 1) -> int:
        """Return the bytes of an adapter slot in each of so many ranks of an engine."""
        total = 0
        for matrix in self.numbers.matrices:
            if self.latent_cache and matrix.name in OUT_OF_LATENTS:
                continue
            inputs, outputs = _SLICES.get(matrix.name, 1) * matrix.inputs, matrix.outputs
            pieces = self._pieces(matrix, tensor_parallel)
            if matrix.name in ROW_PARALLEL or (matrix.name == _EXPERTS and outputs == self.hidden):
                inputs = -(-inputs // pieces)
            elif matrix.name != _HEAD:
                outputs = -(-outputs // pieces)
            total += matrix.count * (inputs + outputs) - self._count_shared(matrix)
        return total * rank * self.number_bytes

    def _count_shared(self, matrices: LoraMatrices) -> int:
        """Return the numbers per rank that slots save of experts' matrices: those of the hidden side but for one expert
        of each layer, on every rank of an engine."""
        if matrices.name != _EXPERTS or self.expert_slots == "own":
            return 0
        return (matrices.count - matrices.count // self.numbers.num_experts) * self.hidden

    def rank_numbers(self, tensor_parallel: int) -> int:
        """Return the numbers of the base in each of so many ranks of an engine, at most. In most kinds each has the
        whole vision tower: images are divided among them."""
        matrices = [
            (matrix, matrix.count * matrix.outputs * matrix.inputs)
            for matrix in self.numbers.matrices
            if not matrix.in_tower
        ]
        others = self.numbers.base - self.numbers.tower - sum(count for _, count in matrices)
        of_matrices = sum(-(-count // self._pieces(matrix, tensor_parallel)) for matrix, count in matrices)
        return self.numbers.tower + of_matrices - (-others // tensor_parallel)

    def _pieces(self, matrices: LoraMatrices, tensor_parallel: int) -> int:
        """Return the number of different pieces that so many ranks of an engine have of a matrix."""
        if matrices.in_tower or matrices.name in REPEATED:
            return 1
        return min(tensor_parallel, self.key_heads) if matrices.name in OF_KEYS else tensor_parallel

    def activation_bytes(self, num_tokens: int, *, recomputes: bool, offloads: bool = False) -> int:
        """Return what a microbatch takes with all layers recomputed, or with none, by estimate. `offloads`: inputs of
        recomputed layers wait in main memory, but two, which are on their way."""
        layers = 4 * self.hidden if recomputes else self.layer_token_bytes
        once = (2 if recomputes else 1) * self.layer_token_bytes + 20 * self.hidden
        num_here = min(self.num_layers, 2) if recomputes and offloads else self.num_layers
        return int(_LOGITS_BYTES + num_tokens * (num_here * layers + once))

    def kv_cache_bytes(self, context: int, tensor_parallel: int, device: str) -> int:
        """Return the least KV cache of an engine, of all its ranks together: a whole context, on the CPU two."""
        contexts = 2 if device == "cpu" else 1
        more_states = 15 * self.state_bytes
        return max(_LEAST_KV_CACHE[device], contexts * (self.context_bytes(context, tensor_parallel) + more_states))

    def context_bytes(self, context: int, tensor_parallel: int) -> int:
        """Return the bytes of a sequence of so many tokens in the KV cache of an engine, in all its ranks together."""
        return context * self.token_bytes(tensor_parallel) + self.state_bytes

    def token_bytes(self, tensor_parallel: int = 1) -> int:
        """Return the bytes of a token in the KV cache of an engine, in all its ranks together: each rank has a head of
        keys at least, or all latents."""
        if self.latent_cache:
            return self.latent_token_bytes * tensor_parallel
        return self.kv_token_bytes * max(self.key_heads, tensor_parallel) // self.key_heads

    def latent_matrix_bytes(self, tensor_parallel: int) -> int:
        """Return the bytes in each rank of an engine of the matrices by which queries read latents."""
        if not self.latent_cache:
            return 0
        numbers = sum(
            matrix.count * matrix.outputs * matrix.inputs
            for matrix in self.numbers.matrices
            if matrix.name == _ABSORBED
        )
        return -(-numbers // tensor_parallel) * self.number_bytes


def model_size(name: str, config: PretrainedConfig, numbers: Numbers, dtype: Dtype) -> ModelSize:
    """Return the shapes that a model's memory follows from."""
    text_config = config.get_text_config()
    return ModelSize(
        name,
        BYTES_PER_NUMBER[dtype],
        numbers,
        hidden=text_config.hidden_size,
        num_layers=text_config.num_hidden_layers,
        vocab_size=text_config.vocab_size,
        layer_token_bytes=_layer_token_bytes(text_config, BYTES_PER_NUMBER[dtype]),
        kv_token_bytes=kv_bytes_per_token(text_config, dtype),
        key_heads=text_config.num_key_value_heads,
        latent_token_bytes=latent_bytes_per_token(text_config, dtype),
        state_bytes=state_bytes_per_sequence(text_config, dtype),
        image_token=image_token(config, BYTES_PER_NUMBER[dtype]),
        exchanged_token_bytes=_token_exchange_bytes(text_config, BYTES_PER_NUMBER[dtype]),
        longest_context=text_config.max_position_embeddings,
    )


def _layer_token_bytes(text_config: PretrainedConfig, number_bytes: int) -> float:
    """Estimate the bytes that a layer saves of a token: its input in float32, the norms' outputs, queries, keys, values
    and attention's output, gate and up. 73.0 KiB for 4 billion parameters, where 73.7 were measured on an H200.

    Where layers have Mamba2, attention, an MLP or experts alone, it is the most that any of them saves."""
    hidden = text_config.hidden_size
    heads, key_heads = text_config.num_attention_heads, text_config.num_key_value_heads
    attention = 2 * (heads + key_heads) * head_width(text_config)
    if chosen := getattr(text_config, "num_experts_per_tok", 0):
        # Of each (token, expert) pair the input, gate, up, their product, and the output.
        inner = getattr(text_config, "moe_intermediate_size", None) or text_config.intermediate_size
        mlp = chosen * (2 * hidden + 3 * inner) + 2 * _width_of_shared_experts(text_config, inner)
    else:
        mlp = 2 * text_config.intermediate_size
    if getattr(text_config, "mamba_num_heads", None) is None:
        return float(number_bytes * (attention + mlp + hidden) + 4 * hidden)
    shape = linear_attention(text_config)
    # In float32: values four times, three matrices of a chunk, and two states of each chunk.
    scan = 4 * (4 * shape.values + 3 * shape.heads * CHUNK + 2 * shape.values * shape.key_width // CHUNK)
    mamba2 = number_bytes * 2 * (shape.values + shape.channels) + scan
    return float(max(mamba2, number_bytes * max(attention, mlp)) + number_bytes * hidden + 4 * hidden)


def _width_of_shared_experts(text_config: PretrainedConfig, inner: int) -> int:
    """Return the inner numbers of the experts that all tokens pass; `inner` are those of another expert."""
    for name in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"):
        if width := getattr(text_config, name, 0):
            return int(width)
    return inner * int(getattr(text_config, "n_shared_experts", 0) or 0)


def _token_exchange_bytes(text_config: PretrainedConfig, number_bytes: int) -> int:
    """Estimate the bytes of queries, keys, values and attention's output of a token, sent and received."""
    heads, key_heads = text_config.num_attention_heads, text_config.num_key_value_heads
    return int(2 * 2 * (heads + key_heads) * head_width(text_config) * number_bytes)
