"""Mapped weights: compared with the files, joined without a copy, and never written to."""

import pickle
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tinker_server.backends.base_weights.mapped import (
    GET_VIEWS,
    Files,
    JoinedViews,
    Source,
    map_tensors,
    map_views,
    require_same,
)
from tinker_server.backends.base_weights.name_map import View
from tinker_server.backends.base_weights.shared_memory import share
from tinker_server.backends.protocol import BackendFailed

WRITES = """
import os, sys, torch
from tinker_server.backends.base_weights.shared_memory import share
tensor = torch.ones(4)
mapped = share([tensor])[id(tensor)].map()
assert mapped.tolist() == [1] * 4
print("mapped", flush=True)
mapped.mul_(2)
print("written")
"""


def test_experts_are_stacked_and_gate_and_up_concatenated_without_a_copy() -> None:
    w13 = torch.randn(3, 8, 5)
    gates, ups = ([one.chunk(2)[half] for one in w13] for half in (0, 1))
    with JoinedViews({"w13": w13}):
        joined = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
    assert joined.equal(w13) and joined.data_ptr() == w13.data_ptr() and joined.is_contiguous()


def test_tensors_that_are_no_neighbours_are_copied() -> None:
    w13 = torch.randn(3, 8, 5)
    others = [w13[0], w13[2], w13[1]], [w13[0], w13[0]], [w13[0], torch.randn(8, 5)]
    with JoinedViews({"w13": w13}):
        stacks = [torch.stack(one) for one in others]
        swapped = torch.cat([w13[0, 4:], w13[0, :4]])
    for stack, parts in zip(stacks, others, strict=True):
        assert all(got.equal(wanted) for got, wanted in zip(stack, parts, strict=True))
    assert swapped.equal(torch.cat([w13[0, 4:], w13[0, :4]]))


@pytest.mark.parametrize("shape", [(8, 3), (600, 40), (7, 600, 40)])
def test_swapped_halves_are_noticed(tmp_path: Path, shape: tuple[int, ...]) -> None:
    right = torch.randn(shape)
    save_file({"w": right}, tmp_path / "model.safetensors")
    swapped = torch.cat(right.chunk(2, -2)[::-1], -2)
    with Files(tmp_path, torch.float32) as files:
        require_same("w", right, shape, files.slice("w"))
        with pytest.raises(BackendFailed, match="w: the shared copy differs from the file"):
            require_same("w", swapped, shape, files.slice("w"))
        with pytest.raises(BackendFailed, match="has shape"):
            require_same("w", right.mT, shape, files.slice("w"))


def test_weights_are_compared_in_the_precision_in_which_they_are_held(tmp_path: Path) -> None:
    right = torch.randn(600, 40)
    save_file({"w": right}, tmp_path / "model.safetensors")
    wrong = right.bfloat16()
    wrong[-1, -1] *= 1 + 2**-7  # by the last bit or two
    with Files(tmp_path, torch.float32) as files:
        require_same("w", right.bfloat16(), (600, 40), files.slice("w"))
        with pytest.raises(BackendFailed, match="w: the shared copy differs from the file"):
            require_same("w", wrong, (600, 40), files.slice("w"))


def test_shared_tensors_keep_layout_ties_and_contents() -> None:
    whole = torch.randn(6, 4)
    tensors = [whole, whole[1:3], whole.T, torch.randn(5).bfloat16(), torch.zeros(0)]
    wanted = [one.clone() for one in tensors]
    shared = share(tensors)
    for one, original in zip(tensors, wanted, strict=True):
        mapped = shared[id(one)].map()
        assert mapped.equal(original) and one.equal(original) and mapped.stride() == one.stride()
    assert shared[id(whole)].begin == shared[id(tensors[1])].begin


def test_a_write_to_mapped_weights_ends_the_writer() -> None:
    done = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, text=True, check=False)
    assert done.returncode < 0 and done.stdout == "mapped\n"


def test_a_holder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match=r"does not answer at .*cpu\.sock"):
        map_views(tmp_path / "cpu.sock", torch.device("cpu"))


def test_a_tensor_of_which_no_rank_of_the_engine_has_a_part_is_read_from_its_file(tmp_path: Path) -> None:
    """As where each rank computes with what it reads, and an engine of a single rank would copy it."""
    wanted = torch.randn(4, 3)
    save_file({"w": wanted}, tmp_path / "model.safetensors")
    view = View("engine.w", (4, 3), (3, 1), 0, (4, 3), (3, 1))
    answer = pickle.dumps({"status": "ok", "tensors": {}, "views": {}, "divided": {"w": view}, "parts": {"w": []}})

    def hold(listening: socket.socket) -> object:
        connection, _ = listening.accept()
        with connection, connection.makefile("rwb") as stream:
            asked = pickle.loads(stream.read(int.from_bytes(stream.read(8), "big")))
            stream.write(len(answer).to_bytes(8, "big") + answer)
        return asked

    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor() as threads:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        asked = threads.submit(hold, listening)
        base = map_tensors(
            Source(tmp_path, tmp_path / "socket", torch.device("cpu"), torch.float32), lambda of: [of, of]
        )
        assert asked.result() == GET_VIEWS
    assert base.own.keys() == base.all().keys() == {"w"} and base.own["w"].equal(wanted)
    base.stand_ins.require_all_found("a model")
