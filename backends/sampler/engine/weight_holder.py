"""Run a process that holds a base's weights on one GPU, for an engine and a trainer to map: `python -m
tinker_server.backends.sampler.engine.weight_holder FD`.

It is vLLM's own weight cache daemon, made with exactly the engine's arguments: its key for what fits an engine knows
nothing of LoRA, by which experts may be laid out otherwise. A trainer asks for views in place of the engine's tensors.
The process ends when its connection to the server does.
"""

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, get_tp_group, init_distributed_environment
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_cache.daemon import WeightCacheDaemon, export_entries, export_model_attrs
from vllm.model_executor.model_loader.weight_cache.protocol import TensorEntry, recv_msg, send_msg
from vllm.model_executor.models.interfaces_base import VllmModel
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

import tinker_server.backends.sampler.engine.vllm_patches.worker  # noqa: F401 - changes layers before they are made, as in the engine
from tinker_server.backends.base_weights.commands import Hold
from tinker_server.backends.base_weights.mapped import GET_VIEWS, Files, Handle
from tinker_server.backends.base_weights.name_map import Part, View, trace_loading, trace_parts
from tinker_server.backends.base_weights.shared_memory import PickledAsTensor, SharedTensor, share
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.progress import Progress
from tinker_server.backends.processes.rpc import KeepWaiting, OnPart, serve
from tinker_server.backends.sampler.engine.engine import check_version, engine_args, layout_args, with_own_links
from tinker_server.backends.sampler.engine.vllm_patches.block_fp8 import staying
from tinker_server.backends.sampler.engine.vllm_patches.gated_norms import keep_gated_norms
from tinker_server.backends.sampler.engine.vllm_patches.mapped_weights import parameters_of
from tinker_server.backends.sampler.engine.vllm_patches.targets import MODEL_INSPECTION

log = logging.getLogger(__name__)


class WeightHolder(WeightCacheDaemon):  # type: ignore[misc]
    """Holds the weights of an engine."""

    def __init__(self, spec: ModelSpec, gpu: int | None) -> None:
        self._socket = spec.base_socket(gpu)
        self._socket.parent.mkdir(mode=0o700, exist_ok=True)
        self._spec = spec = with_own_links(spec, self._socket.with_suffix(".files"))
        self._views: dict[str, View] = {}
        self._divided: dict[str, View] = {}
        """Where an undivided engine would have what ranks have between them."""
        self._parts: dict[str, list[Part]] = {}
        """Where this rank has its parts of it."""
        self._shared: dict[int, SharedTensor] = {}
        self._seat = (spec.base_gpus.index(gpu), spec.tensor_parallel) if spec.divides_base else (0, 1)
        """The engine's rank whose weights these are, and how many there are."""
        meeting = f"file://{self._socket.with_suffix(f'.{os.getpid()}')}"
        MODEL_INSPECTION.replace(lambda look: look())  # this process begins CUDA, as another was to avoid
        super().__init__(holder_config(spec), self._seat[0], 0, meeting, socket_dir=str(self._socket.parent))
        # vLLM would have it wait for the others, with whom it has nothing to do.
        self.global_rank, self.world_size, self.tp_size = 0, 1, 1

    @property
    def _socket_path(self) -> str:
        return str(self._socket)

    def load_model(self) -> None:
        """Load the weights, and find where those of the files are."""
        keep_gated_norms()
        if current_platform.is_cpu():
            from tinker_server.backends.sampler.engine.vllm_patches.cpu import share_on_cpu

            share_on_cpu()
            join_alone(self.vllm_config, self.distributed_init_method)
            with set_current_vllm_config(self.vllm_config):
                self.model = self.get_model()
            self._shared = share(parameters_of(self._loaded).values())
        else:
            torch.cuda.set_per_process_memory_fraction(self._spec.placement.gpu_fraction, self.local_rank)
            super().load_model()
        config = self.vllm_config.model_config
        with Files(Path(self._spec.directory), config.dtype, staying(config)) as files:
            # Layers are registered with a configuration, once.
            found = find_views(holder_config(replace(self._spec, tensor_parallel=1)), files)
            if self._seat[1] > 1:
                found = self._divide(found, files)
        held = parameters_of(self._loaded)
        self._views = {name: view for name, view in found.items() if view.fits(held[view.tensor])}
        for name in found.keys() - self._views.keys():
            log.warning(
                "%s: %s has another layout than its file: the trainer keeps its own copy", self._spec.directory, name
            )

    def get_model(self) -> nn.Module:
        """Make vLLM's model with this rank's weights."""
        with as_rank(*self._seat):
            model: nn.Module = super().get_model()
        return model

    def _divide(self, views: Mapping[str, View], files: Files) -> dict[str, View]:
        """Find the parts of this rank; return the views of what it has whole."""
        with as_rank(*self._seat), make_on_meta(holder_config(self._spec)) as model:
            parts = trace_parts(model.load_weights, parameters_of(model), files.layouts())
        held, wholes = parameters_of(self._loaded), {}
        for name, view in views.items():
            found = parts.get(name, [])  # a rank may have nothing of a vocabulary
            if not all(part.view.fits(held[part.view.tensor]) for part in found):
                continue
            if len(found) == 1 and found[0].view.shape == view.shape:
                wholes[name] = found[0].view
            else:
                self._divided[name], self._parts[name] = view, found
        return wholes

    @property
    def _loaded(self) -> nn.Module:
        model: nn.Module | None = self.model
        assert model is not None
        return model

    def _handle_connection(self, conn: socket.socket) -> None:
        """Answer one request. The weights are never released."""
        request = recv_msg(conn)
        if request == GET_VIEWS:
            parts = {"divided": self._divided, "parts": self._parts}
            send_msg(conn, {"status": "ok", "tensors": self._export(), "views": self._views, **parts})
        elif request["cmd"] == "get_state" and self._shared:
            self._send_shared_state(conn, request)
        elif request["cmd"] == "get_state":
            self._handle_get_state(conn, request)
        elif request["cmd"] == "get_memory":
            send_msg(conn, {"status": "ok", "memory_bytes": torch.accelerator.memory_allocated()})
        else:
            send_msg(conn, {"status": "error", "message": f"unknown command {request['cmd']!r}"})

    def _export(self) -> dict[str, Handle]:
        """Return handles of the tensors that have views, which are one consumer's."""
        held = parameters_of(self._loaded)
        parts = (part.view for found in self._parts.values() for part in found)
        names = {view.tensor for view in (*self._views.values(), *parts)}
        if self._shared:
            return {name: self._shared[id(held[name])] for name in names}
        # Parameters of vLLM's own classes would have a trainer import vLLM.
        return {name: reduce_tensor(held[name].detach().as_subclass(Tensor)) for name in names}

    def _send_shared_state(self, conn: socket.socket, request: Mapping[str, object]) -> None:
        """Replace vLLM's `_handle_get_state`, which would send tensors of the CPU by value."""
        from tinker_server.backends.sampler.engine.vllm_patches.cpu import CPU_UUID

        mismatched = self.cache_config.mismatched_fields(request["cache_config"])
        if mismatched:
            send_msg(conn, {"status": "mismatch", "fields": mismatched})
            return
        entries, aliases = export_entries(self._loaded)
        held = parameters_of(self._loaded)
        for name in entries.keys() & held.keys():  # an engine writes to its buffers
            entries[name] = TensorEntry("param", cpu_tensor=PickledAsTensor(self._shared[id(held[name])]))
        attrs = export_model_attrs(self._loaded)
        answer = {"status": "ok", "entries": entries, "aliases": aliases, "attrs": attrs, "gpu_uuid": CPU_UUID}
        send_msg(conn, answer)


def holder_config(spec: ModelSpec) -> VllmConfig:
    """Return the engine's configuration, but that the weights are read from files."""
    renderer = Renderer(spec.directory, image_cache_bytes=0, max_image_pixels=spec.max_image_pixels)
    placement = replace(spec.placement, engines=spec.placement.engines[:1])
    args: AsyncEngineArgs = engine_args(replace(spec, base_dir=None, placement=placement), renderer.family.vision)
    for name, value in layout_args(spec).items():
        setattr(args, name, value)
    return args.create_engine_config()


def join_alone(config: VllmConfig, meeting: str) -> None:
    """Make the groups of ranks that vLLM's layers ask for, of this process alone."""
    init_distributed_environment(
        world_size=1, rank=0, distributed_init_method=meeting, local_rank=0, backend=current_platform.dist_backend
    )
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)


@contextmanager
def as_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """Have vLLM's layers take this process for a rank of several, while they are made and loaded: none needs the
    others for that."""
    group = get_tp_group()
    alone = group.rank_in_group, group.world_size
    group.rank_in_group, group.world_size = rank, num_ranks
    try:
        yield
    finally:
        group.rank_in_group, group.world_size = alone


def find_views(config: VllmConfig, files: Files) -> dict[str, View]:
    """Return where vLLM's model has each tensor of the files; no weights are read."""
    with make_on_meta(config) as model:
        return trace_loading(model.load_weights, parameters_of(model), files.layouts())


@contextmanager
def make_on_meta(config: VllmConfig) -> Iterator[VllmModel]:
    """Make vLLM's model without memory, in a block in which it may load its weights."""
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        yield initialize_model(vllm_config=config, model_config=config.model_config)


class Process:
    """Holds the weights from its only command on."""

    def __init__(self, keep_waiting: KeepWaiting) -> None:
        del keep_waiting  # nobody hurries it

    def handle(self, command: Hold, emit: OnPart) -> None:
        """Load the weights and serve them."""
        check_version(device=command.spec.device)
        Progress(emit).does("reads weights")
        holder = WeightHolder(command.spec, command.gpu)
        holder.load_model()
        ready = threading.Event()
        threading.Thread(target=self._serve, args=(holder, ready), daemon=True).start()
        ready.wait()

    def _serve(self, holder: WeightHolder, ready: threading.Event) -> None:
        try:
            holder.serve_forever(ready.set)
        finally:
            log.exception("stopped serving %s", holder._socket)
            sys.stderr.flush()
            os._exit(1)  # the server then notices


def main() -> None:
    """Run this process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    serve(lambda keep_waiting: Process(keep_waiting).handle)
    os._exit(0)  # there is nothing to save, and the thread that serves never ends


if __name__ == "__main__":
    main()
