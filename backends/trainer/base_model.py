"""The frozen base model of a rank: loaded, tested, compiled."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tinker_server.api_schemas.inputs import Datum
from tinker_server.backends.families.family import RenderedImage
from tinker_server.backends.families.lora_names import find_trained_modules
from tinker_server.backends.formats.load_check import (
    BASE_TOKENS,
    LoadCheck,
    image_and_text,
    load_check_image,
    load_check_tokens,
)
from tinker_server.backends.formats.model_files import layer_state_bytes
from tinker_server.backends.inputs.rendering import Layout, Rendered, Renderer
from tinker_server.backends.kernels.targets import OPERATORS
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.patches import for_device, require_as_written
from tinker_server.backends.processes.progress import Progress
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.checkpoint_files import SnapshotWriter
from tinker_server.backends.trainer.distributed import World, gather_objects
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.backends.trainer.lora.files import LoraFiles
from tinker_server.backends.trainer.lora.model import LoraModel
from tinker_server.backends.trainer.model import targets
from tinker_server.backends.trainer.model.compiling import (
    can_be_compiled,
    compile_layers,
    run_text,
    text_microbatch,
    warm_up,
)
from tinker_server.backends.trainer.model.cuda_graphs import Graphs
from tinker_server.backends.trainer.model.float32_residual import keep_in_float32
from tinker_server.backends.trainer.model.linear_attention import pack_linear_attention
from tinker_server.backends.trainer.model.loading import load, reporting_progress
from tinker_server.backends.trainer.model.packing import Microbatch, pack
from tinker_server.backends.trainer.model.recompute import Memory, Recomputation
from tinker_server.backends.trainer.model.router_replay import RouterReplay
from tinker_server.backends.trainer.model.routing import experts_of, identify_with_routing
from tinker_server.backends.trainer.model.self_test import (
    differences_of_rounding,
    own_logprobs,
    packing_is_exact,
    require_whole_products,
)
from tinker_server.backends.trainer.model.shared_prefixes import SAVED_PER_STATE
from tinker_server.backends.trainer.model.sharing import may_share, sharing_is_exact
from tinker_server.backends.trainer.model.token_logprobs import Scorer, TokenGradient
from tinker_server.backends.trainer.model.vision import ImageEncoder

log = logging.getLogger(__name__)
_GRAPHS_PART = 1 / 6
"""Largest part of a GPU's memory for the trainer that graphs of small microbatches may hold."""


class BaseModel:
    """Everything that the trained models share. `scorer` is the only way through the base, `renderer` the only way into
    it."""

    def __init__(self, config: ModelSpec, world: World, progress: Progress) -> None:
        """Raises BackendFailed for a model that cannot be trained here."""
        require_as_written(for_device([*targets.PATCHES, *OPERATORS], world.device.type))
        # Pixels are cached if towers are trained; else the vision tower's features are.
        self.renderer = Renderer(
            config.directory,
            image_cache_bytes=config.image_cache_bytes if config.trains_vision else 0,
            max_image_pixels=config.max_image_pixels,
            pixel_dtype=torch.uint8,
            pins_pixels=world.device.type == "cuda",
        )
        family = self.renderer.family
        self._device = world.device
        self._max_context_length = config.max_context_length
        self.is_sharded = config.mesh.shard > 1
        """True if ranks have the base between them, and all-gather each of its layers."""
        self.is_coupled = self.is_sharded or world.context.size > 1
        """True if ranks wait for each other within a microbatch."""
        with reporting_progress(Path(config.directory), progress):
            root = load(config, family, world, is_sharded=self.is_sharded)
        progress.does("tests the model")
        model = root.model
        self.num_parameters = model.num_parameters()
        modules = find_trained_modules(family, model, train_vision=config.trains_vision)
        self.snapshots = SnapshotWriter()
        own = own_logprobs(root, self.renderer, world.device)
        keep_in_float32(model)
        pack_linear_attention(model.get_decoder())
        self.weights = Adapters(
            model, modules, config.max_lora_rank, world, config.lora_layout, config.summed_lora_rank
        )
        self.files = LoraFiles(config.name, getattr(torch, config.dtype), world, self.snapshots)
        self.vision: ImageEncoder | None = None
        if family.vision is not None:
            tower = family.vision.tower(model.base_model, getattr(torch, config.dtype))
            self.vision = ImageEncoder(tower, model.base_model, config.image_cache_bytes, self.weights)
            if world.device.type == "cuda" and not self.is_sharded:
                blank = family.vision.process(Image.new("RGB", (64, 64)))
                self.vision.warm_up(RenderedImage("blank", blank), world.device)
        self.router_replay = None if config.routing_dir is None else RouterReplay(model, config.routing_dir)
        self.scorer = Scorer(root, self.vision, self.weights, self.router_replay, world.context).eval()
        self.packs = packing_is_exact(self.scorer, self.renderer, own, world.device)
        """True if several samples may share a packed microbatch."""
        if not self.packs:
            log.warning("%s: this architecture mixes packed samples; each will run alone", config.name)
        shares = self.packs and may_share(self.scorer, family, self._max_context_length, world)
        shares = shares and sharing_is_exact(self.scorer, self.renderer, own, world)
        self.whole_below: int | None = 0 if shares else None
        """Microbatches of text of fewer tokens are computed whole; None: all are. Others compute tokens that datums
        share once."""
        self.allowed_nats = differences_of_rounding(model.dtype, own)
        """Mean and largest difference of log probabilities that is rounding."""
        self.saved_per_segment = SAVED_PER_STATE if family.has_linear_attention else 0
        """Tokens that sharing must save for each segment."""
        self.tokens_per_state = 0.0
        """Tokens that take as much memory as a layer's state, where memory is limited."""
        self.memory: Memory | None = None
        """The GPU's memory, if microbatches are made to fit into it."""
        self._graphs: Graphs | None = None
        if world.device.type == "cuda" and config.dtype == "bfloat16":
            linears = [module for module in model.get_decoder().modules() if isinstance(module, nn.Linear)]
            sizes = {size for linear in linears for size in (linear.out_features, linear.in_features)}
            require_whole_products(sizes, world.device)
            progress.does("compiles")
            compile_layers(model.get_decoder().layers)
            layers = Recomputation(model.get_decoder().layers, offloads=config.offloads_inputs)
            carries = shares and family.has_linear_attention
            warm_up(
                self.scorer,
                self.renderer,
                world,
                layers,
                is_coupled=self.is_coupled,
                carries=carries,
                longest=self._max_context_length,
            )
            if config.placement.trainer_bytes:
                progress.does("measures memory")
                self.memory = self._measure_memory(layers, world, config.placement.trainer_bytes)
                if carries:
                    of_rank = self.memory.tokens_as_large_as(layer_state_bytes(model.config.get_text_config()))
                    self.tokens_per_state = max(gather_objects(of_rank, world))  # all ranks plan alike
            # A graph would hold collectives.
            can_be_captured = not self.is_coupled and all(map(can_be_compiled, model.get_decoder().layers))
            if self.packs and can_be_captured:
                progress.does("tests graphs")
                self._graphs = self._make_graphs(config, world)
                self._count_graphs()
                if shares:
                    most = gather_objects(0 if self._graphs is None else self._graphs.max_tokens + 1, world)
                    self.whole_below = min(most)  # all ranks plan alike

    def score(self, batch: Microbatch, scales_TR: Tensor, gradient: TokenGradient | None = None) -> Tensor:
        """Return [N, K] float32, nats, of the targets of all samples, as `Scorer` gives them; on a GPU, small
        microbatches by a graph."""
        # A graph is fixed: layers that recompute are not part of it.
        recomputes = self.memory is not None and self.memory.recomputes
        if self._graphs is not None and not recomputes and self._graphs.takes(batch, scales_TR, self._has_room):
            try:
                return self._graphs(batch, scales_TR)
            except BackendFailed as error:
                log.warning("small microbatches run eagerly from now on: %s", error)
                self._graphs = None
            finally:
                self._count_graphs()
        return batch.of_samples(self.scorer(batch, scales_TR, gradient))

    def release_graphs(self) -> None:
        """Give the memory of graphs back, to something that does not fit beside them."""
        if self._graphs is not None:
            self._graphs.release()
            self._count_graphs()

    def _has_room(self, graph_tokens: int) -> bool:
        """Return whether a graph of so many tokens leaves room for the longest text. Without a limit of the memory, all
        have room."""
        return self.memory is None or self.memory.leaves_room(graph_tokens, self._max_context_length)

    def _count_graphs(self) -> None:
        if self.memory is not None:
            self.memory.graphs_bytes = 0 if self._graphs is None else self._graphs.memory_bytes

    def tell_apart(
        self, names: tuple[str, str], data: Sequence[Datum], layouts: Sequence[Layout]
    ) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]] | None:
        """Return what gives other identities to tokens of datums whose replayed routing differs; None if nothing is
        replayed. `names` are the user's and the model's."""
        if self.router_replay is None:
            return None
        experts = experts_of(self.router_replay, self.renderer, names, data, layouts)
        return partial(identify_with_routing, layouts=layouts, experts=experts)

    def score_load_check(self, model: LoraModel, model_id: str) -> LoadCheck:
        """Score the text that travels with a model's weights, on all ranks alike. Scores may be not finite.

        A model that trains its vision tower, or whose images' tokens see each other, scores an image too, if the
        context has room for it.
        """
        token_ids = load_check_tokens(self.renderer.vocab_size, self.renderer.family.placeholders)
        has_image = model.config.train_vision or self.renderer.family.sees_whole_images
        return replace(self._score_text(token_ids, model, has_image=has_image), model_id=model_id)

    def score_base(self) -> LoadCheck:
        """Score a text by the base alone, on all ranks alike; behind an image too, if the model takes images and the
        context has room for one."""
        num_tokens = min(BASE_TOKENS, self._max_context_length - 1)  # an engine samples a token behind it
        token_ids = load_check_tokens(self.renderer.vocab_size, self.renderer.family.placeholders, num_tokens)
        return self._score_text(token_ids, None, has_image=self.renderer.takes_images)

    def _score_text(self, token_ids: np.ndarray, model: LoraModel | None, *, has_image: bool) -> LoadCheck:
        """Score a text, and with `has_image` behind an image too; by the base alone without a model."""
        logprobs = self._next_logprobs(model, Rendered(token_ids, [], []))[:-1]
        load_check = LoadCheck(token_ids.tolist(), logprobs)
        if not has_image:
            return load_check
        image = load_check_image()
        rendered = self.renderer.render(image_and_text(image, load_check.token_ids), "the image of a test")
        if len(rendered.token_ids_T) > self._max_context_length:
            return load_check
        behind_image = self._next_logprobs(model, rendered)[-len(token_ids) - 1 : -1]
        return replace(load_check, image=image, logprobs_behind_image=behind_image)

    def _next_logprobs(self, model: LoraModel | None, rendered: Rendered) -> list[float]:
        """Return each token's log probability of the next one, in nats; the last token's is that of the first."""
        num_tokens = len(rendered.token_ids_T)
        batch = pack([(rendered, np.roll(rendered.token_ids_T, -1))], self.renderer.family, self._device)
        if model is None:
            self.weights.load([])
            scales_TR = self.weights.blank(num_tokens)
        else:
            (scales_R,) = self.weights.load([model])
            scales_TR = scales_R.repeat(num_tokens, 1)
            if model.config.train_vision:
                batch = replace(batch, tower_scales=[scales_R] * len(rendered.images))
        if self.memory is not None:
            self.memory.prepare(self.memory.layers_for(num_tokens))
        with torch.no_grad():
            logprobs_T1 = self.score(batch, scales_TR)
        logprobs: list[float] = logprobs_T1[:num_tokens, 0].tolist()
        return logprobs

    def _make_graphs(self, config: ModelSpec, world: World) -> Graphs | None:
        if self.memory is None:
            graphs = Graphs(self.scorer, world.device)
        else:
            graphs = Graphs(self.scorer, world.device, self.memory.tokens_in(_GRAPHS_PART))
            self.memory.prepare(0)
        try:
            self.weights.load([])
            graphs.test(text_microbatch(self.renderer, world, [41, 26]))
        except BackendFailed as error:
            log.warning("%s: small microbatches run eagerly: %s", config.name, error)
            return None
        return graphs

    def _measure_memory(self, layers: Recomputation, world: World, limit_bytes: int) -> Memory:
        def run(num_tokens: int) -> None:
            run_text(self.scorer, self.renderer, world, [num_tokens * world.context.size])

        memory = Memory(layers, run, world.device, limit_bytes, lambda value: max(gather_objects(value, world)))
        log.info("%s: %s", self.scorer.model.config.model_type, memory.describe())
        return memory
