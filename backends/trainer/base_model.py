"""The base model of one rank, frozen or itself in training: loaded, tested, compiled."""

import logging
from pathlib import Path
from typing import cast

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.families.family import RenderedImage
from backends.families.lora_names import trained_modules
from backends.inputs.rendering import Renderer
from backends.kernels.varlen_attention import OPERATORS
from backends.model_spec import ModelSpec
from backends.patches import for_device, require_as_written
from backends.processes.progress import Progress
from backends.protocol import BackendFailed
from backends.trainer.distributed import World
from backends.trainer.full.weights import FullWeights
from backends.trainer.lora.adapters import Adapters
from backends.trainer.model import targets
from backends.trainer.model.compiling import compile_layers, run_text, text_row, warm_up
from backends.trainer.model.counting import counted
from backends.trainer.model.cuda_graphs import Graphs
from backends.trainer.model.float32_residual import keep_in_float32
from backends.trainer.model.loading import load
from backends.trainer.model.packing import Microbatch
from backends.trainer.model.recompute import Memory
from backends.trainer.model.router_replay import Replay
from backends.trainer.model.self_test import own_logprobs, packing_is_exact, require_whole_products
from backends.trainer.model.token_logprobs import Scorer, TokenGradient
from backends.trainer.model.vision import ImageEncoder
from backends.trainer.trained_weights import TrainedWeights

log = logging.getLogger(__name__)
_KEPT_BY_GRAPHS = 1 / 6
"""Part of a GPU's memory for the trainer that graphs of small rows may keep, at most."""


class FrozenBase:
    """What all tenants share. `scorer` is the only way through the model, `renderer` the only way into it."""

    def __init__(self, config: ModelSpec, world: World, progress: Progress) -> None:
        """Raises BackendFailed for a model that cannot be trained here."""
        require_as_written(for_device([*targets.PATCHES, *OPERATORS], world.device.type))
        # Pixels are kept where towers are trained; else what the vision tower makes of them is.
        self.renderer = Renderer(
            config.directory,
            image_cache_bytes=config.image_cache_bytes if config.trains_vision else 0,
            max_image_pixels=config.max_image_pixels,
            pixel_dtype=torch.uint8,
            pins_pixels=world.device.type == "cuda",
        )
        family = self.renderer.family
        self.is_sharded = config.mesh.shard > 1
        """Whether ranks wait for each other within a row. Where each has the whole base, none does."""
        with counted(Path(config.directory), progress):
            root = load(config, family, world, is_sharded=self.is_sharded)
        progress.does("tests the model")
        model = root.model
        self.num_parameters = model.num_parameters()
        modules = trained_modules(family, model, train_vision=config.trains_vision)
        self.full = FullWeights(root, modules, world) if config.full else None
        """Where one model trains all weights."""
        own = own_logprobs(root, self.renderer, world.device)
        keep_in_float32(model)
        self.adapters: TrainedWeights = self.full or Adapters(model, modules, config.max_lora_rank)
        self.vision: ImageEncoder | None = None
        if family.vision is not None:
            tower = family.vision.tower(model.base_model, getattr(torch, config.dtype))
            self.vision = ImageEncoder(tower, model.base_model, config.image_cache_bytes, self.adapters)
            if world.device.type == "cuda" and not self.is_sharded:
                blank = family.vision.process(Image.new("RGB", (64, 64)))
                self.vision.warm_up(RenderedImage("blank", blank), world.device)
        self.replay = None if config.routing_dir is None else Replay(model, config.routing_dir)
        self.scorer = Scorer(root, self.vision, self.adapters, self.replay).eval()
        is_exact = packing_is_exact(self.scorer, self.renderer, own, world.device)
        self.packs = is_exact and not family.has_linear_attention
        """Whether samples may stand in one row."""
        if not self.packs:
            log.warning("%s: this architecture mixes packed samples; each will run alone", config.name)
        self.memory: Memory | None = None
        """Of the GPU, where rows are made to fit into it."""
        self._graphs: Graphs | None = None
        if world.device.type == "cuda" and config.dtype == "bfloat16":
            linears = [module for module in model.get_decoder().modules() if isinstance(module, nn.Linear)]
            require_whole_products({size for linear in linears for size in linear.weight.shape}, world.device)
            if self.full is None:  # code is compiled for weights that want no gradient
                progress.does("compiles")
                compile_layers(model.get_decoder().layers)
                warm_up(self.scorer, self.renderer, world)
            if config.placement.trainer_bytes:
                self.memory = self._measured(model, world, config.placement.trainer_bytes)
            if self.packs and not self.is_sharded and self.full is None:  # a graph would hold collectives
                self._graphs = self._tested_graphs(config, world)

    def score(self, batch: Microbatch, scales_TR: Tensor, gradient: TokenGradient | None = None) -> Tensor:
        """[T, K] float32, nats, as `Scorer` gives them; small rows by a graph, on a GPU."""
        # What a graph does is fixed: layers that compute again are none of it.
        recomputes = self.memory is not None and self.memory.recomputes
        if self._graphs is not None and not recomputes and self._graphs.takes(batch):
            try:
                return self._graphs(batch, scales_TR)
            except BackendFailed as error:
                log.warning("small rows launch each kernel from now on: %s", error)
                self._graphs = None
            finally:
                if self.memory is not None and self._graphs is not None:
                    self.memory.set_aside_bytes = self._graphs.memory_bytes
        return cast(Tensor, self.scorer(batch, scales_TR, gradient))

    def _tested_graphs(self, config: ModelSpec, world: World) -> Graphs | None:
        if self.memory is None:
            graphs = Graphs(self.scorer, world.device)
        else:
            graphs = Graphs(self.scorer, world.device, self.memory.tokens_in(_KEPT_BY_GRAPHS))
            self.memory.prepare(1)
        try:
            self.adapters.load([])
            graphs.test(text_row(self.renderer, world, [41, 26]))
        except BackendFailed as error:
            log.warning("%s: small rows launch each kernel: %s", config.name, error)
            return None
        return graphs

    def _measured(self, model: PreTrainedModel, world: World, limit_bytes: int) -> Memory:
        def run_row(num_tokens: int) -> None:
            run_text(self.scorer, self.renderer, world, [num_tokens])

        memory = Memory(model.get_decoder().layers, run_row, world.device, limit_bytes)
        log.info("%s: %s", model.config.model_type, memory.describe())
        return memory
