"""Sets up a base model's vLLM engine: its arguments, its version, the size of its KV cache."""

import contextlib
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

import vllm
from transformers import AutoConfig, GenerationConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from tinker_server.backends.families.coverage import find_packed
from tinker_server.backends.families.family import Vision
from tinker_server.backends.families.lora_names import engine_modules
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.formats.base_files import find_needed_files, link_files
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import DRAWN_TOKENS, ModelSpec
from tinker_server.backends.patches import for_device, require_as_written
from tinker_server.backends.protocol import BackendFailed, Unavailable
from tinker_server.backends.sampler.checks import MAX_TOPK
from tinker_server.backends.sampler.engine.fair_admission import RESERVE
from tinker_server.backends.sampler.engine.vllm_patches.block_fp8 import make_quantization_config
from tinker_server.backends.sampler.engine.vllm_patches.mapped_weights import SOCKETS
from tinker_server.backends.sampler.engine.vllm_patches.targets import EXECUTOR, PATCHES

VLLM_VERSION = "0.32.0"
"""The version whose internals `vllm_patches/` changes; those that it names are hashed, others may differ silently."""
QUEUE_BYTES = 241 << 20
"""Shared memory that vLLM wants free for a queue between ranks: ten chunks of 24 MiB, and flags. Its queues take memory
only as they are used."""
_SHARED = Path("/dev/shm")
HOLDER_PATIENCE_S = 24 * 3600.0
"""Time in which the weights of an engine must be held, however slow the disk. A holder that fails ends its engines."""
MAX_ADAPTERS = 32
"""Adapters held in main memory and in the scratch directory; more only while in use."""


def check_version(found: str = vllm.__version__, device: str = "cpu") -> None:
    """Raise BackendFailed for a vLLM that our changes of its inside were not written for."""
    if found.partition("+")[0] != VLLM_VERSION:
        raise BackendFailed(
            f"the sampler needs vLLM {VLLM_VERSION}, whose inside it changes, and found {found}: install that version"
        )
    require_as_written(for_device(PATCHES, device))


def require_shared_memory(num_ranks: int, free_bytes: int | None = None) -> None:
    """Raise Unavailable if the ranks of an engine have no room for their queues. `free_bytes`: of this machine, if
    absent."""
    if num_ranks == 1 or not _SHARED.is_dir():
        return
    free_bytes = shutil.disk_usage(_SHARED).free if free_bytes is None else free_bytes
    if free_bytes < QUEUE_BYTES:
        raise Unavailable(
            f"the {num_ranks} ranks of an engine (--tensor-parallel, setting backend.tensor_parallel) exchange work in"
            f" {_SHARED}, which has {free_bytes >> 20} MiB free and needs {QUEUE_BYTES >> 20} MiB: make room there, or"
            " give a container more of it (docker run --shm-size 1g)"
        )


def with_own_links(spec: ModelSpec, links: Path) -> ModelSpec:
    """Return the spec of a process that reads the model by links to the files that the trainer reads: vLLM takes what
    else it finds in a directory. Raises BackendFailed as `find_needed_files`."""
    return replace(spec, directory=str(link_files(find_needed_files(Path(spec.directory)), links.absolute())))


def engine_args(config: ModelSpec, vision: Vision | None) -> AsyncEngineArgs:
    """Return the arguments of vLLM's engine for this model, in its directory of links, on this device."""
    # The size is each rank's: of the heads of keys, each has its part.
    kv_cache_bytes = None if config.kv_cache_bytes is None else config.kv_cache_bytes // config.tensor_parallel
    return AsyncEngineArgs(
        model=config.directory,
        # By itself vLLM would choose config, tokenizer and weights in Mistral's own format if they are there.
        config_format="hf",
        tokenizer_mode="hf",
        dtype=config.dtype,
        # Samples without a seed of their own should not repeat when the engine starts again.
        seed=secrets.randbelow(2**31),
        max_model_len=config.max_context_length + DRAWN_TOKENS,
        max_num_seqs=max_sequences(config),
        # Among admitted sequences, prompts of owners with few running ones come first (`fair_admission.py`).
        scheduling_policy="priority",
        kv_cache_memory_bytes=kv_cache_bytes,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        max_logprobs=3 * MAX_TOPK,  # likeliest, chosen and drawn tokens
        worker_cls="tinker_server.backends.sampler.engine.vllm_patches.worker.Worker",
        enable_return_routed_experts=config.routing_dir is not None,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        enable_log_requests=False,
        hf_overrides=_config_changes(config),
        **_device_args(config),
        **({"load_format": "safetensors"} if config.base_dir is None else _mapping_args(config)),
        **({} if config.tensor_parallel == 1 else _parallel_args(config, vision)),
        **_adapter_args(config, vision),
        **({} if vision is None else _vision_args(config, vision)),
    )


def _mapping_args(config: ModelSpec) -> dict[str, object]:
    """Have the engine map the weights that the holder on its GPU has, and wait for them before it allocates memory.
    Of several ranks each has its own socket (`vllm_patches/mapped_weights.py:choose_socket`)."""
    gpus = config.base_gpus if config.divides_base else [next(iter(config.placement.engines[0]), None)]
    sockets = SOCKETS.join(str(config.base_socket(gpu)) for gpu in gpus)
    loader = {"socket_path": sockets, "fallback": False, "state_timeout_s": HOLDER_PATIENCE_S}
    args: dict[str, object] = {"load_format": "ipc_cache", "model_loader_extra_config": loader}
    return args | layout_args(config)


def layout_args(config: ModelSpec) -> dict[str, object]:
    """Return arguments by which holder and engine lay out experts as the files do."""
    return {} if config.device == "cpu" else {"moe_backend": "triton"}


def _parallel_args(config: ModelSpec, vision: Vision | None) -> dict[str, object]:
    args = {"tensor_parallel_size": config.tensor_parallel, "distributed_executor_backend": EXECUTOR}
    # Images are divided among ranks, not the tower: its heads may be too few.
    return args if vision is None else args | {"mm_encoder_tp_mode": "data"}


def _adapter_args(config: ModelSpec, vision: Vision | None) -> dict[str, object]:
    lora = vision.lora if config.trains_vision and vision is not None else None
    tower = () if lora is None else lora.engine_modules
    return {
        "enable_lora": True,
        "max_lora_rank": config.max_lora_rank,
        "max_loras": config.adapter_slots + 1,  # one for weights that are being published
        "max_cpu_loras": max(MAX_ADAPTERS, config.adapter_slots + 1),
        "lora_target_modules": [*engine_modules(latent_cache=config.latent_cache), *tower],
        # Images are then computed with the request's own adapter, and cached under its name too.
        "enable_tower_connector_lora": bool(tower),
        # Adapters of experts are matrix by matrix, whatever form the model's have.
        "enable_mixed_moe_lora_format": True,
        "enable_moe_shared_loras": config.expert_slots == "service",
    }


def stays_packed(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that an engine keeps packed, as the trainer does."""
    if spec.base_precision is None:
        return {}
    config = AutoConfig.from_pretrained(spec.directory)
    return find_packed(find_family(config, spec.source), config, spec.directory, spec.base_precision)


def _config_changes(config: ModelSpec) -> dict[str, object]:
    """Return changes of the model's config."""
    changes: dict[str, object] = {}
    if config.device == "cuda":
        # Logits of 16 to 32 rounded to bfloat16 are 0.03 nats off on average. No copy of the head's weights is made.
        changes["head_dtype"] = "float32"
    staying = stays_packed(config)
    if config.is_quantised or staying:
        # Weights are dequantised as they are read, or for each product.
        changes["quantization_config"] = make_quantization_config(staying) if staying else None
    return changes


def _vision_args(config: ModelSpec, vision: Vision) -> dict[str, object]:
    """Have the engine cache pixels that it was sent: `requests.send_once` relies on it."""
    kept_gib = config.image_cache_bytes / 2**30
    return {"mm_processor_cache_gb": kept_gib, **vision.engine_options(config.max_images_per_prompt)}


def max_sequences(config: ModelSpec) -> int:
    """Return the most sequences that the engine decodes at once; one of them for weights that are being published."""
    return config.max_concurrent_samples + RESERVE + 1


def _device_args(config: ModelSpec) -> dict[str, object]:
    if config.device == "cpu":
        return {
            "enforce_eager": True,
            "max_num_batched_tokens": max(4096, max_sequences(config)),
            # As the trainer has the states of linear attention; by itself vLLM chooses by the processor.
            "mamba_ssm_cache_dtype": "float32",
        }
    # Graphs (`prefill_graphs.py`) without torch.compile: as fast as both, and up in a third of the time.
    return {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
        # FlashInfer's kernel for linear attention would be built at its first use, by a compiler for CUDA.
        "gdn_prefill_backend": "triton",
        "gpu_memory_utilization": config.placement.sampler_fraction,
        "max_num_batched_tokens": max(config.engine_tokens, max_sequences(config)),
    }


def end_tokens(renderer: Renderer, source: str) -> list[int]:
    """Return the tokens that end a sequence by default: those of the generation config, else of the config."""
    ids = None
    with contextlib.suppress(OSError):
        ids = GenerationConfig.from_pretrained(source).eos_token_id
    if ids is None:
        ids = renderer.config.get_text_config().eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
