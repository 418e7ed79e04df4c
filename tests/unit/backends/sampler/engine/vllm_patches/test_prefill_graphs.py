"""The engine has a CUDA graph for each kind of step."""

from types import SimpleNamespace

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from tinker_server.backends.sampler.engine.vllm_patches import prefill_graphs
from tinker_server.backends.sampler.engine.vllm_patches.prefill_graphs import (
    StepsWithImages,
    capture_both_kinds,
    schedule_in_the_kernels,
)

SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
MAX_SEQUENCES = 265


@pytest.fixture
def manager(monkeypatch):
    """vLLM's own, in the mode `mode`, with graphs for no adapter and for any number of three."""
    for name in ("_init_candidates", "dispatch"):
        monkeypatch.setattr(CudaGraphManager, name, getattr(CudaGraphManager, name))
    monkeypatch.setattr(prefill_graphs, "IMAGES", StepsWithImages())
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, raising=False)
    capture_both_kinds()

    def make(mode: CUDAGraphMode) -> CudaGraphManager:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=MAX_SEQUENCES),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=512),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=None,
        )
        made = CudaGraphManager(config, "cuda", mode, decode_query_len=1, lora_capture_cases=[0, 3])
        made._graphs_captured = True
        return made

    return make


def step(manager: CudaGraphManager, lengths: list[int], adapters: int = 1):
    uniform = lengths[0] if len(set(lengths)) == 1 else None
    return manager.dispatch(len(lengths), sum(lengths), uniform, adapters, max_query_len=max(lengths))


def test_steps_that_only_decode_have_graphs_of_their_own(manager):
    found = step(manager(CUDAGraphMode.FULL), [1] * 5)
    assert (found.cg_mode, found.num_tokens, found.num_reqs) == (CUDAGraphMode.FULL, 8, 8)
    assert (found.uniform_token_count, found.num_active_loras) == (1, 3)


@pytest.mark.parametrize(("lengths", "tokens"), [([64], 64), ([1, 1, 40], 64), ([1] * 100 + [200], 320), ([9, 9], 32)])
def test_steps_with_a_prompt_have_a_graph_of_any_lengths(manager, lengths, tokens):
    found = step(manager(CUDAGraphMode.FULL), lengths, adapters=0)
    assert (found.cg_mode, found.num_tokens, found.uniform_token_count) == (CUDAGraphMode.FULL, tokens, None)
    assert found.num_reqs >= len(lengths)
    assert found.num_active_loras == 0


def test_long_prompts_have_none(manager):
    assert step(manager(CUDAGraphMode.FULL), [513]).cg_mode == CUDAGraphMode.NONE


def scheduled(tokens: dict[str, int], *, new: dict[str, bool], finished: tuple[str, ...] = ()) -> SimpleNamespace:
    """A step as vLLM's scheduler describes it; `new` says which new requests have images."""
    requests = [SimpleNamespace(req_id=name, mm_features=[object()] if seen else []) for name, seen in new.items()]
    return SimpleNamespace(finished_req_ids=set(finished), scheduled_new_reqs=requests, num_scheduled_tokens=tokens)


def test_a_step_with_a_prompt_has_no_graph_while_a_request_with_images_is_in_it(manager):
    made = manager(CUDAGraphMode.FULL)
    prefill_graphs.IMAGES.record_step(scheduled({"seen": 40, "text": 9}, new={"seen": True, "text": False}))
    found = step(made, [40, 9])
    assert (found.cg_mode, found.num_tokens, found.num_reqs, found.num_active_loras) == (CUDAGraphMode.NONE, 49, 2, 3)
    prefill_graphs.IMAGES.record_step(scheduled({"seen": 1, "later": 9}, new={"later": False}))
    assert step(made, [1, 9]).cg_mode == CUDAGraphMode.NONE
    assert step(made, [1, 1]).cg_mode == CUDAGraphMode.FULL  # the image was read in an earlier step
    prefill_graphs.IMAGES.record_step(scheduled({"text": 1, "last": 9}, new={"last": False}))
    assert step(made, [1, 9]).cg_mode == CUDAGraphMode.FULL
    prefill_graphs.IMAGES.record_step(scheduled({"seen": 9}, new={"seen": False}, finished=("seen",)))
    assert step(made, [9]).cg_mode == CUDAGraphMode.FULL


def test_every_graph_that_may_serve_a_step_is_captured(manager):
    made = manager(CUDAGraphMode.FULL)
    (recorded,) = made._capture_descs.values()
    assert {graph for graphs in made._candidates.values() for graph in graphs} == set(recorded)
    assert len(set(recorded)) == len(recorded)
    assert [graph.num_tokens for graph in recorded] == sorted((one.num_tokens for one in recorded), reverse=True)
    assert made.compilation_config.cudagraph_capture_sizes == SIZES


def test_where_attention_can_only_decode_in_graphs_vllm_lists_them_itself(manager):
    made = manager(CUDAGraphMode.FULL_DECODE_ONLY)
    assert step(made, [1] * 5).num_tokens == 8
    assert step(made, [64]).cg_mode == CUDAGraphMode.NONE


@pytest.mark.parametrize(("headdim", "is_made"), [(32, False), (64, False), (96, True), (128, True), (256, False)])
def test_a_schedule_is_made_before_the_kernels_only_if_its_layout_is_that_of_every_step(headdim, is_made, monkeypatch):
    def made_by_vllm(builder, *, aot_schedule, **sizes):
        return sizes if aot_schedule else None

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "_get_scheduler_metadata", made_by_vllm)
    schedule_in_the_kernels()
    schedule = FlashAttentionMetadataBuilder._get_scheduler_metadata
    builder = SimpleNamespace(headdim=headdim)
    assert schedule(builder, aot_schedule=True, max_query_len=1) == ({"max_query_len": 1} if is_made else None)
    assert schedule(builder, aot_schedule=False, max_query_len=1) is None
