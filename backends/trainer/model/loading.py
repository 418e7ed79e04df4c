"""Load the frozen base from its files. If ranks share it, each keeps its own shard of every tensor: none holds it
whole.

transformers reads the files, renames and stacks their tensors, and sets one finished tensor after the other in a model
without memory. A hook takes each as it is set and leaves a placeholder without memory until all have come. So whatever
transformers can read is sharded, and only the tensor at hand is ever whole.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Protocol, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, Mxfp4Config, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import set_tqdm_hook

from tinker_server.backends.base_weights.held_shards import HeldShard, placeholder, stand_in
from tinker_server.backends.base_weights.mapped import BaseTensors, Files, Source, alone, map_tensors
from tinker_server.backends.families.coverage import find_packed
from tinker_server.backends.families.deepseek_v3 import not_loaded
from tinker_server.backends.families.family import Family
from tinker_server.backends.families.gpt_oss.experts import lay_out_experts
from tinker_server.backends.families.nemotron_h import unlimit_time_steps
from tinker_server.backends.formats.block_fp8 import SCALE, is_in_blocks, require_kernel
from tinker_server.backends.formats.expert_names import stack_name
from tinker_server.backends.formats.model_files import quantisation, tensor_bytes
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.names import join_names
from tinker_server.backends.processes.progress import Progress
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.distributed import Root, World, gather_objects, shard
from tinker_server.backends.trainer.lora.experts import StackedExperts
from tinker_server.backends.trainer.lora.packed_fp8 import PackedExperts, PackedLinear
from tinker_server.backends.trainer.model import attention
from tinker_server.backends.trainer.model.own_precision import keeping_precision
from tinker_server.backends.trainer.model.stacked_experts import Readable, stacked_shapes, with_stacked_experts

log = logging.getLogger(__name__)
_LARGEST_OWN_PART = 0.25
"""Largest part of a mapped base of which the trainer may have a copy."""
_SMALL_OWN_BYTES = 256 << 20
"""A copy that may be larger than that part: a tiny model's, whose files are float32."""
_LOADING = "Loading weights"
"""Label of transformers' progress bar, which goes over the model's parameters by name, each with its tensors."""


class Found(TypedDict):
    """How transformers found a model's files to differ from the model."""

    missing_keys: Iterable[str]
    unexpected_keys: Iterable[str]
    mismatched_keys: Iterable[tuple[str, Sequence[int], Sequence[int]]]
    """Names with the shapes in the files and in the model."""


class LoadedParameter(Protocol):
    """transformers' account of a parameter that it loads."""

    layer_targets: Mapping[str, Iterable[str]]
    """Names of the tensors that it is made of, by its own names."""


Parameters = Iterable[tuple[str, LoadedParameter]]


def load(config: ModelSpec, family: Family, world: World, *, is_sharded: bool) -> Root:
    """Load the frozen base to this rank's device: its shard of each parameter if `is_sharded`, else the whole. Only
    ranks of one machine share it.

    Raises BackendFailed with the names of tensors that the files lack, that have another shape than the model's, or
    that the model does not have.
    """
    dtype = getattr(torch, config.dtype)
    by_heads = world.context.size > 1
    attention_name = family.attention(attention.implementation(world.device, dtype, by_heads=by_heads))
    staying: dict[str, tuple[int, ...]] = {}
    if config.base_precision is not None:
        found_config = AutoConfig.from_pretrained(config.directory)
        staying = find_packed(family, found_config, config.directory, config.base_precision)
    tensors = None if config.base_dir is None else _mapped(config, world, dtype, staying)
    shards = _Shards(world.machine, tensors, is_sharded=is_sharded)
    hook = register_module_parameter_registration_hook(shards.take)  # type: ignore[arg-type]
    try:
        arguments: dict[str, object] = {"dtype": dtype, "attn_implementation": attention_name}
        with keeping_precision():
            model, found = _model(config, family, tensors, staying, arguments)
    finally:
        hook.remove()
    _check(found, config.directory, not_loaded(model.config))
    own = shards.of(model, config.directory)
    shards.forget()  # it would keep what is laid out anew
    lay_out_experts(model, own, dtype, are_packed=config.base_precision == "mxfp4")
    unlimit_time_steps(model)
    if staying:
        _pack_modules(model, [name for name, shape in staying.items() if len(shape) == 2], world.device)
        for name, weight in _read_packed(config, staying, tensors):
            own[name] = shards.cut(weight)
    if tensors is not None:
        tensors.stand_ins.require_all_found(config.directory)
    _replace(model, lambda name, parameter: placeholder(own[name], parameter))
    model.requires_grad_(False)
    _move_buffers(model, world.device)
    root = Root(model)
    if is_sharded:
        mapped = set() if tensors is None else {name for name, held in own.items() if tensors.has_mapped(held)}
        whole = {parameter for name, parameter in _all_parameters(model) if name in mapped}
        shard(root, model.get_decoder().layers, world.machine, whole)
    _replace(model, lambda name, parameter: _fill(own[name], parameter))
    if tensors is not None:
        _require_mapped(tensors, own.values(), config.directory)
    return root


def _mapped(config: ModelSpec, world: World, dtype: torch.dtype, staying: Collection[str]) -> BaseTensors:
    """Return the files' tensors, of the holder on this rank's GPU."""
    machine, gpus = world.machine, config.placement.gpus
    on_cpu = machine.rank if config.divides_base else None
    base_socket = config.base_socket(gpus[machine.rank] if gpus else on_cpu)
    source = Source(Path(config.directory), base_socket, world.device, dtype, staying)
    return map_tensors(source, partial(gather_objects, world=machine) if config.divides_base else alone)


def _model(
    spec: ModelSpec,
    family: Family,
    tensors: BaseTensors | None,
    staying: Mapping[str, tuple[int, ...]],
    arguments: dict[str, object],
) -> tuple[PreTrainedModel, Found]:
    """Return transformers' model, and how it found the files to differ. Tensors of `staying`, which have these shapes,
    are not loaded."""
    # Mismatched sizes are named by `_check`.
    arguments = {**arguments, "output_loading_info": True, "ignore_mismatched_sizes": True}
    config = AutoConfig.from_pretrained(spec.directory)
    is_fp8 = is_in_blocks(quantisation(config))
    stand_ins = {name: _StandIn(shape, getattr(torch, spec.dtype)) for name, shape in stacked_shapes(staying).items()}
    if tensors is not None:
        state: dict[str, Readable] = {name: found for name, found in tensors.all().items() if name not in staying}
        with tensors.without_copies():  # which joins nothing in transformers' threads
            state = {name: found[...] for name, found in with_stacked_experts(state).items()} if is_fp8 else state
            state |= {name: stand_in[...] for name, stand_in in stand_ins.items()}
            return _made_of(state, family, config, arguments)
    if is_fp8 or staying:
        # transformers takes blocks of other sizes where 128 does not divide a matrix. So it gets dequantised tensors.
        dtype = getattr(torch, spec.dtype)
        with Files(Path(spec.directory), dtype, staying) as files:
            slices: dict[str, Readable] = {name: files.slice(name) for name in files.names() if name not in staying}
            return _made_of(with_stacked_experts(slices) | stand_ins, family, config, arguments)
    if quantisation(config) is not None:
        arguments["quantization_config"] = Mxfp4Config(dequantize=True)
    model, found = family.model_class.from_pretrained(spec.directory, **arguments)
    return model, found


@dataclass(frozen=True)
class _StandIn:
    """A tensor without memory of the size of one that is not loaded."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: EllipsisType, /) -> Tensor:
        return torch.zeros((), dtype=self.dtype).expand(self.shape)


@dataclass(frozen=True)
class _PackedInFile:
    """A tensor that is packed when it is read."""

    files: Files
    name: str

    def __getitem__(self, index: EllipsisType, /) -> Tensor:
        return self.files.tensor(self.name)


def _read_packed(spec: ModelSpec, names: Collection[str], tensors: BaseTensors | None) -> Iterator[tuple[str, Tensor]]:
    """Yield what stays packed by the model's names: of tensors that are read already, or from the files."""
    if tensors is not None:
        read = tensors.all()
        with tensors.without_copies():
            stacked = with_stacked_experts({name: read[name] for name in names})
            whole = {name: tensor[...] for name, tensor in stacked.items()}
        yield from whole.items()
        return
    with Files(Path(spec.directory), getattr(torch, spec.dtype), names) as files:
        stacked = with_stacked_experts({name: _PackedInFile(files, name) for name in names})
        yield from ((name, tensor[...]) for name, tensor in stacked.items())


def _pack_modules(model: PreTrainedModel, names: Iterable[str], device: torch.device) -> None:
    """Replace the linears and the experts of tensors that stay in fp8; those in MXFP4 were replaced before."""
    for module in dict.fromkeys(name.rpartition(".")[0] for name in map(stack_name, names)):
        found = model.get_submodule(module)
        if isinstance(found, nn.Linear):
            model.set_submodule(module, PackedLinear(found))
        else:
            require_kernel(device)
            experts = cast(StackedExperts, found)
            count, hidden, inner = experts.down_proj.shape
            model.set_submodule(module, PackedExperts((count, hidden, inner), experts.act_fn))


def _made_of(
    state: Mapping[str, Readable],
    family: Family,
    config: PretrainedConfig,
    arguments: dict[str, object],
) -> tuple[PreTrainedModel, Found]:
    """Have transformers make its model of these tensors, none of them quantised, as it would of the files."""
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        model_class = type(family.model_class.from_config(config))
    model, found = model_class.from_pretrained(None, config=config, state_dict=state, **arguments)
    return model, found


def _require_mapped(tensors: BaseTensors, shards: Collection[Tensor], source: str) -> None:
    """Raise BackendFailed if most of a model is a second copy: the memory was planned for one. `shards` are what this
    rank has of each parameter."""
    shards = list({id(shard): shard for shard in shards}.values())  # each that is tied once
    total_bytes = sum(shard.nbytes for shard in shards)
    own = (shard for shard in shards if not isinstance(shard, HeldShard) and not tensors.has_mapped(shard))
    own_bytes = sum(shard.nbytes for shard in own)
    figures = f"{own_bytes / 2**30:.2f} of {total_bytes / 2**30:.2f} GiB are a copy of the trainer's own"
    if own_bytes > max(_SMALL_OWN_BYTES, _LARGEST_OWN_PART * total_bytes):
        raise BackendFailed(f"{source}: {figures}: the engine has them otherwise; start with --base-copies 2")
    log.info("%s: %s", source, figures)


class _Shards:
    """This rank's shards of the parameters that were read so far."""

    def __init__(self, world: World, tensors: BaseTensors | None, *, is_sharded: bool) -> None:
        self._device, self._tensors = world.device, tensors
        self._index, self._count = (world.rank, world.size) if is_sharded else (0, 1)
        self._shards: dict[nn.Parameter, Tensor] = {}
        """By the placeholder without memory: tied parameters share it."""

    def take(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Return the parameter to set in place of one that is about to be set in any module."""
        if parameter is None or not _was_read(parameter):
            return None
        placeholder = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False
        )
        placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
        self._shards[placeholder] = self.cut(parameter.detach())
        return placeholder

    def cut(self, whole: Tensor) -> Tensor:
        """Return the shard that FSDP2 gives this rank: as torch.chunk cuts it, empty if there are too few rows. What
        every rank has mapped is not cut."""
        if whole.untyped_storage().nbytes() < whole.nbytes:  # a `_StandIn`'s
            return whole
        tensors = self._tensors
        if tensors is not None and tensors.stand_ins.has(whole):
            return stand_in(tensors.stand_ins.find(whole), self._count, self._device)
        if self._count == 1 or (tensors is not None and tensors.has_mapped(whole)):
            return whole.to(self._device)
        shards = whole.chunk(self._count)
        own = shards[self._index] if self._index < len(shards) else whole[:0]
        # Memory of its own: a view would keep the whole alive.
        return torch.empty(own.shape, dtype=own.dtype, device=self._device).copy_(own)

    def forget(self) -> None:
        """Keep no parameter alive."""
        self._shards.clear()

    def of(self, model: nn.Module, source: str) -> dict[str, Tensor]:
        """Return the shard of every parameter of the model by name. Raises BackendFailed if one was never read."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        _refuse(source, "lacks", [name for name, one in parameters.items() if one not in self._shards])
        return {name: self._shards[placeholder] for name, placeholder in parameters.items()}


def _was_read(parameter: nn.Parameter) -> bool:
    """Return whether transformers read it from the files: it marks what it must not initialise."""
    return not parameter.is_meta and getattr(parameter, "_is_hf_initialized", False)


def _check(found: Found, source: str, not_loaded: tuple[str, ...]) -> None:
    """Raise BackendFailed for what transformers reports as missing, unexpected or mismatched in `found`; but that names
    may begin as those of `not_loaded`."""
    _refuse(source, "lacks", found["missing_keys"])
    unexpected = [name for name in found["unexpected_keys"] if not name.startswith(not_loaded)]
    _refuse(source, "has tensors that the model has not:", unexpected)
    shapes = [f"{name} {tuple(has)} instead of {tuple(wanted)}" for name, has, wanted in found["mismatched_keys"]]
    _refuse(source, "has other shapes than the model:", shapes)


def _refuse(source: str, fault: str, names: Iterable[str]) -> None:
    """Raise BackendFailed if there are names."""
    found = sorted(names)
    if found:
        raise BackendFailed(f"{source} {fault} {join_names(found)}")


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Move the buffers, which transformers has computed or read on the CPU: the shards are of parameters alone."""
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, buffer.to(device))


def _replace(model: PreTrainedModel, new: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replace every parameter by what `new` gives for its name and itself; what is tied stays tied."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in _all_parameters(model):
        if parameter not in found:
            found[parameter] = new(name, parameter)
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, found[parameter])


def _all_parameters(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter by name, tied ones by each of their names."""
    return list(model.named_parameters(remove_duplicate=False))


def _fill(shard: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return the parameter that has its memory, where `like` has none."""
    parameter = nn.Parameter(as_sharded(shard, like), requires_grad=False)
    if isinstance(shard, HeldShard):  # what DTensor makes of it, without its attribute
        parameter._local_tensor = shard  # type: ignore[attr-defined]
    return parameter


def as_sharded(shard: Tensor, like: Tensor) -> Tensor:
    """Wrap a shard as FSDP2 holds it, if FSDP2 has sharded `like`."""
    if not isinstance(like, DTensor):
        return shard
    assert isinstance(shard, HeldShard) or shard.shape == like.to_local().shape
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _loaded_name(name: str) -> str:
    """Return the name under which transformers may load a tensor of the files with others."""
    return stack_name(name.removesuffix(SCALE))


@contextmanager
def reporting_progress(directory: Path, progress: Progress) -> Iterator[None]:
    """Inside, report to `progress` the bytes that transformers has loaded of the files in `directory`, in place of its
    own progress bar."""
    sizes: Counter[str] = Counter()
    for key, size in tensor_bytes(directory).items():
        sizes[_loaded_name(key)] += size

    def hook(bar: Callable[..., object], args: tuple[Parameters], kwargs: dict[str, object]) -> object:
        return each(args[0]) if kwargs.get("desc") == _LOADING else bar(*args, **kwargs)

    def each(parameters: Parameters) -> Iterator[tuple[str, LoadedParameter]]:
        for name, mapping in parameters:
            read = {_loaded_name(key) for keys in mapping.layer_targets.values() for key in keys}
            yield name, mapping  # and goes on when it is loaded
            progress.loaded(sum(sizes.get(key, 0) for key in read))

    progress.does("reads weights", sizes.total())
    before = set_tqdm_hook(hook)
    try:
        yield
    finally:
        set_tqdm_hook(before)
