"""Parts of the sampler that need vLLM's modules, but no engine.

pytest tests/contract/test_sampler_parts.py
"""

import inspect
from dataclasses import replace

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from tinker_server.backends.protocol import BackendFailed, Unavailable
from tinker_server.backends.sampler.engine import engine
from tinker_server.backends.sampler.engine.engine import QUEUE_BYTES, check_version, require_shared_memory
from tinker_server.backends.sampler.engine.requests import stops
from tinker_server.backends.sampler.engine.vllm_patches.targets import PATCHES


def test_another_version_of_vllm_than_the_one_our_changes_were_written_for_is_refused():
    check_version()
    check_version("0.32.0+cu130")
    with pytest.raises(BackendFailed, match=r"vLLM 0\.32\.0.* found 0\.33\.0"):
        check_version("0.33.0")


def test_ranks_without_room_for_their_queues_are_refused_by_name() -> None:
    message_queue = inspect.signature(MessageQueue.__init__).parameters
    chunks = message_queue["max_chunks"].default * (message_queue["max_chunk_bytes"].default + 1 + 8)
    assert chunks <= QUEUE_BYTES
    require_shared_memory(1, free_bytes=0)
    require_shared_memory(2, free_bytes=QUEUE_BYTES)
    with pytest.raises(Unavailable, match=r"the 2 ranks .*--tensor-parallel.* which has 63 MiB free and needs"):
        require_shared_memory(2, free_bytes=63 << 20)


def test_the_same_version_with_other_code_inside_is_refused(monkeypatch):
    wrong = [replace(patch, sha256="0" * 64) for patch in PATCHES if patch.device == "cuda"]
    monkeypatch.setattr(engine, "PATCHES", wrong)
    check_version(device="cpu")
    with pytest.raises(BackendFailed, match=r"draws-v2: vllm\.v1\.worker\.gpu\..*gumbel_sample is changed"):
        check_version(device="cuda")


@pytest.mark.parametrize(
    ("asked", "token_ids", "strings"),
    [
        (None, [1, 2], []),
        ([], [], []),
        ("end", [1, 2], ["end"]),
        (["end", "stop"], [1, 2], ["end", "stop"]),
        ([7, 2], [1, 2, 7], []),
    ],
)
def test_stop_adds_to_the_models_end_tokens_and_only_an_empty_list_switches_them_off(asked, token_ids, strings):
    assert stops(asked, end_tokens=[1, 2]) == (token_ids, strings)
