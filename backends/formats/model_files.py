"""Find a base model's files, and read what they say of it. Loads no weights."""

import errno
import hashlib
import json
import logging
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoTokenizer, PretrainedConfig

from tinker_server.backends.formats.base_files import (
    CONFIG_FILE,
    OTHER_LAYOUTS,
    find_needed_files,
    link_files,
    text_files,
    weight_files,
)
from tinker_server.backends.protocol import BackendFailed, Unavailable

log = logging.getLogger(__name__)
_MB = 1e6
_SAMPLE_BYTES = 256
"""Bytes from the middle of each tensor, for its fingerprint: training of any kind changes nearly every number."""
BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2}


def local_directory(source: str) -> Path:
    """Return the directory named by `source`, or the hub's files for it (downloaded if they are not cached)."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or source.startswith((".", "~")):
        raise BackendFailed(f"model directory {source} does not exist")
    _announce_download(source)
    try:
        return Path(snapshot_download(source, ignore_patterns=OTHER_LAYOUTS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        kind = Unavailable if _may_pass(error) else BackendFailed
        raise kind(f"{source} is no directory here, and the model hub does not give it: {reason}") from None


def _may_pass(error: BaseException) -> bool:
    """Return whether the hub did not answer, or the disk is full: another try may succeed."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        error = error.__cause__
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(error, LocalEntryNotFoundError):
        return not constants.HF_HUB_OFFLINE
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _announce_download(source: str) -> None:
    """Log how much the hub will send, before it does. Raises BackendFailed if the disk has no room for it."""
    try:
        files = snapshot_download(source, ignore_patterns=OTHER_LAYOUTS, dry_run=True)
    except (HfHubHTTPError, HFValidationError, OSError):
        return  # the hub does not answer; the files may be here all the same
    missing = [file.file_size or 0 for file in files if file.will_download]
    if not missing:
        return
    cache = Path(constants.HF_HUB_CACHE)
    has_bytes = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if sum(missing) > has_bytes:
        raise Unavailable(
            f"{source}: its {len(missing)} files have {sum(missing) / _MB:.0f} MB, and {cache} has"
            f" {has_bytes / _MB:.0f} MB left: free some, or name another folder by HF_HOME"
        )
    log.info("downloading %s from the hub: %d files, %.0f MB, into %s", source, len(missing), sum(missing) / _MB, cache)


def check_tokenizer(directory: Path) -> None:
    """Raises BackendFailed without a tokenizer, which the sampler needs for stop strings; it is read from the files
    that the engine gets."""
    files = {path.relative_to(directory).as_posix(): path for path in text_files(directory)}
    try:
        with TemporaryDirectory() as links:
            tokenizer = AutoTokenizer.from_pretrained(link_files(files, Path(links) / "model"))
    except Exception as error:  # noqa: BLE001 - transformers raises what it happens to meet first
        raise BackendFailed(f"{directory}: no usable tokenizer: {str(error).splitlines()[0]}") from None
    # If the files are missing, transformers makes one up that knows its special tokens and no others.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise BackendFailed(f"{directory}: no usable tokenizer: there is no tokenizer.json")


def tensor_bytes(directory: Path) -> dict[str, int]:
    """Return the bytes of each tensor in the safetensors files."""
    return {tensor.name: tensor.num_bytes for _, tensor in _tensors(directory)}


def tensor_layouts(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Return the dtype (as safetensors spells it) and the shape of each tensor in the safetensors files, by name."""
    return {tensor.name: (tensor.dtype, tensor.shape) for _, tensor in _tensors(directory)}


def quantisation(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """Return how a model's files are quantised, as its config says; None if they are not."""
    found: Mapping[str, Any] | None = getattr(config, "quantization_config", None)
    return found


def require_fields(
    architecture: str,
    fields: Mapping[str, tuple[object, object]],
    source: str,
    refusal: str = "is not supported: the engine has it with {known} alone",
) -> None:
    """Raise BackendFailed, naming the first field of a config whose value is not the known value; `fields` has both."""
    for field, (value, known) in fields.items():
        if value != known:
            raise BackendFailed(f"{source}: {architecture} with {field} {value} {refusal.format(known=known)}")


def fingerprint(directory: Path, made: str | None = None) -> str:
    """Hash that identifies a base model: 64 hexadecimal digits. `made`: the form that its matrices are given at load.

    It covers the config, every tensor's name, type and shape, and a sample of its numbers. It is the same wherever the
    files are and however the tensors are spread over them; it takes some milliseconds for every hundred tensors.
    Raises BackendFailed for a directory whose files may be read in two ways.
    """
    find_needed_files(directory)
    config = json.loads((directory / CONFIG_FILE).read_text())
    for key in ("transformers_version", "_name_or_path"):  # fields about the program that wrote it
        config.pop(key, None)
    parts = []
    for path, tensors in groupby(_tensors(directory), key=itemgetter(0)):
        with path.open("rb") as file:
            for _, tensor in tensors:
                file.seek(tensor.begin + max(0, tensor.num_bytes - _SAMPLE_BYTES) // 2)
                sample = file.read(min(_SAMPLE_BYTES, tensor.num_bytes))
                parts.append((tensor.name, tensor.dtype, tensor.shape, sample.hex()))
    content = [config, sorted(parts), *([made] if made else [])]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class _Tensor:
    """An entry of a safetensors header."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    """Offset of its bytes in the file."""
    num_bytes: int


def _tensors(directory: Path) -> Iterator[tuple[Path, _Tensor]]:
    """Yield each tensor of the weights with its file. Raises BackendFailed, naming both files, if two have it."""
    found: dict[str, Path] = {}
    for path in weight_files(directory):
        for tensor in _read_header(path):
            if (other := found.setdefault(tensor.name, path)) != path:
                raise BackendFailed(f"{directory} has {tensor.name} twice: in {other.name} and in {path.name}")
            yield path, tensor


def _read_header(path: Path) -> Iterator[_Tensor]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield _Tensor(name, entry["dtype"], entry["shape"], 8 + length + begin, end - begin)


def head_width(text_config: PretrainedConfig) -> int:
    """Return the numbers of a head's query or key; its value has as many, or fewer and zeros."""
    # With latent attention head_dim is the rotated part alone. Older architectures' configs name none.
    named = getattr(text_config, "qk_head_dim", None) or getattr(text_config, "head_dim", None)
    return int(named or text_config.hidden_size // text_config.num_attention_heads)


_WITHOUT_KEYS = ("linear_attention", "mlp", "moe")
"""Kinds of layers that keep no keys and values; the last two have neither attention nor a state."""


def kv_bytes_per_token(text_config: PretrainedConfig, dtype: str) -> int:
    """Return the bytes of a token's keys and values in all layers that keep them."""
    kinds = getattr(text_config, "layer_types", None) or ["full_attention"] * text_config.num_hidden_layers
    num_layers = sum(kind not in _WITHOUT_KEYS for kind in kinds)
    num_heads = text_config.num_key_value_heads
    return int(2 * num_layers * num_heads * head_width(text_config) * BYTES_PER_NUMBER[dtype])


def latent_bytes_per_token(text_config: PretrainedConfig, dtype: str) -> int:
    """Return the bytes of a token's latents and of the rotated part of its keys in all layers; 0 without latents."""
    if (latent := getattr(text_config, "kv_lora_rank", None)) is None:
        return 0
    return int(text_config.num_hidden_layers * (latent + text_config.qk_rope_head_dim) * BYTES_PER_NUMBER[dtype])


@dataclass(frozen=True)
class LinearAttention:
    """The shape of a layer of linear attention."""

    heads: int
    """Heads of values, each with a state of its own."""
    values: int
    """Numbers of all their values for a token."""
    key_width: int
    """Numbers of a head's key: a state has so many for each number of a value."""
    channels: int
    """Numbers of a token that are convolved: values, and what writes to a state and reads it."""
    convolved: int
    """Tokens that the convolution sees."""


def linear_attention(text_config: PretrainedConfig) -> LinearAttention:
    """Return the shape of a model's layers of linear attention."""
    if (heads := getattr(text_config, "mamba_num_heads", None)) is not None:
        values, width = heads * text_config.mamba_head_dim, text_config.ssm_state_size
        channels = values + 2 * text_config.n_groups * width
        return LinearAttention(heads, values, width, channels, text_config.conv_kernel)
    keys = text_config.linear_num_key_heads * text_config.linear_key_head_dim
    heads = text_config.linear_num_value_heads
    values = heads * text_config.linear_value_head_dim
    convolved = text_config.linear_conv_kernel_dim
    return LinearAttention(heads, values, text_config.linear_key_head_dim, 2 * keys + values, convolved)


def layer_state_bytes(text_config: PretrainedConfig) -> int:
    """Return the bytes of a state of a layer of linear attention, in float32."""
    shape = linear_attention(text_config)
    return shape.values * shape.key_width * BYTES_PER_NUMBER["float32"]


def state_bytes_per_sequence(text_config: PretrainedConfig, dtype: str) -> int:
    """Return the bytes of a sequence's state in all layers of linear attention; its heads' states are counted in
    float32."""
    num_layers = sum(kind == "linear_attention" for kind in getattr(text_config, "layer_types", None) or ())
    if not num_layers:
        return 0
    shape = linear_attention(text_config)
    convolution = shape.channels * (shape.convolved - 1)
    return int(num_layers * (convolution * BYTES_PER_NUMBER[dtype] + layer_state_bytes(text_config)))
