"""Specifications of tiny models that tests serve."""

import threading
from dataclasses import replace
from pathlib import Path

from tinker_server.backends.model_spec import ModelSpec


def tiny_spec(source: Path) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        source=str(source),
        directory=str(source),
        fingerprint="",
        files_fingerprint="",
        arch="",
        vocab_size=0,
        takes_images=True,
        device="cpu",
        dtype="float32",
        max_context_length=1024,
        max_lora_rank=64,
        adapter_bytes=0,
        adapter_matrices=0,
        max_tokens_per_microbatch=1024,
        max_concurrent_samples=256,
        adapter_slots=4,
        max_images_per_prompt=8,
        image_cache_bytes=1 << 26,
        max_image_pixels=10**7,
        kv_cache_bytes=64 << 20,
        silence_s=600,
        scratch_dir=Path("scratch"),
    )


def held(spec: ModelSpec, directory: Path) -> ModelSpec:
    """The spec of a model whose base, or the parts of all ranks, threads of this process hold."""
    from tinker_server.backends.sampler.engine.weight_holder import WeightHolder

    directory.mkdir(mode=0o700)
    spec = replace(spec, base_copies=1, base_dir=directory)
    for gpu in spec.base_gpus:
        holder = WeightHolder(spec, gpu)
        holder.load_model()
        ready = threading.Event()
        threading.Thread(target=holder.serve_forever, args=(ready.set,), daemon=True).start()
        assert ready.wait(10)
    return spec
