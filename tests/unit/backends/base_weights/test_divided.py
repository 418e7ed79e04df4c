"""Parameters that are made of what each of an engine's ranks has, where it divides them."""

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import Tensor

from tinker_server.backends.base_weights.divided import Divided, StandIns
from tinker_server.backends.base_weights.mapped import JoinedViews
from tinker_server.backends.base_weights.name_map import Part, trace_loading, trace_parts
from tinker_server.backends.formats.block_fp8 import packed, packed_bytes, unpack
from tinker_server.backends.formats.divided_fp8 import copy_part
from tinker_server.backends.protocol import BackendFailed

Own = Mapping[str, Tensor]
Load = Callable[[Own, Iterable[tuple[str, Tensor]], int, int], None]
"""Into a rank's tensors, given its number and how many there are."""
E, I, H = 3, 8, 6  # noqa: E741
"""Experts, inner and hidden width."""
NUM_RANKS = 4


def cut(tensor: Tensor, dim: int, rank: int, num_ranks: int) -> Tensor:
    size = tensor.shape[dim] // num_ranks
    return tensor.narrow(dim, rank * size, size)


def load_attention(own: Own, files: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int) -> None:
    """Rows of queries, columns of the output, and two heads of keys, of which four ranks have each one twice."""
    for name, tensor in files:
        if name == "q":
            own["qk"][: 8 // num_ranks].copy_(cut(tensor, 0, rank, num_ranks))
        elif name == "k":
            pieces = min(2, num_ranks)
            own["qk"][8 // num_ranks :].copy_(cut(tensor, 0, rank * pieces // num_ranks, pieces))
        else:
            own["o"].copy_(cut(tensor, 1, rank, num_ranks))


def load_experts(own: Own, files: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int) -> None:
    for name, tensor in files:
        expert, part = name.split(".")
        if part == "down":
            own["w2"][int(expert)].copy_(cut(tensor, 1, rank, num_ranks))
        else:
            own["w13"][int(expert)].chunk(2)[("gate", "up").index(part)].copy_(cut(tensor, 0, rank, num_ranks))


def load_transposed(own: Own, files: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int) -> None:
    for _, tensor in files:
        for expert, one in enumerate(tensor.transpose(1, 2)):
            for part, half in enumerate(one.chunk(2)):
                own["w13"][expert].chunk(2)[part].copy_(cut(half, 0, rank, num_ranks))


def load_vocabulary(own: Own, files: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int) -> None:
    """Of 9 tokens each of 4 ranks has room for 4: the last has none, and the third one."""
    for _, tensor in files:
        size = 16 // num_ranks
        mine = tensor[rank * size : (rank + 1) * size]
        own["vocabulary"][: len(mine)].copy_(mine)


def join_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stacks = [torch.stack([tensors[f"{at}.{part}"] for at in range(E)]) for part in ("gate", "up", "down")]
    return {"gate_up": torch.cat(stacks[:2], 1), "down": stacks[2]}


def as_they_are(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(tensors)


def shapes_of_experts(num_ranks: int) -> dict[str, tuple[int, ...]]:
    return {"w13": (E, 2 * I // num_ranks, H), "w2": (E, H, I // num_ranks)}


EXPERT = {"gate": (I, H), "up": (I, H), "down": (H, I)}
CASES: dict[str, tuple[Load, Callable[[int], dict[str, tuple[int, ...]]], dict[str, tuple[int, ...]], object]] = {
    "attention": (
        load_attention,
        lambda ranks: {"qk": (8 // ranks + 4 // min(2, ranks), H), "o": (H, 8 // ranks)},
        {"q": (8, H), "k": (4, H), "o": (H, 8)},
        as_they_are,
    ),
    "experts one by one": (
        load_experts,
        shapes_of_experts,
        {f"{at}.{part}": shape for at in range(E) for part, shape in EXPERT.items()},
        join_experts,
    ),
    "a stack of experts, inputs first": (
        load_transposed,
        lambda ranks: {"w13": (E, 2 * I // ranks, H)},
        {"stack": (E, H, 2 * I)},
        as_they_are,
    ),
    "a vocabulary": (
        load_vocabulary,
        lambda ranks: {"vocabulary": (16 // ranks, H)},
        {"embeddings": (9, H)},
        as_they_are,
    ),
}


def traced(
    load: Load, shapes: Callable[[int], dict[str, tuple[int, ...]]], files: Mapping[str, Tensor]
) -> tuple[list[StandIns], list[dict[str, Tensor]]]:
    """What each rank knows, and the tensors that each has loaded."""
    layouts = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in files.items()}
    dtype = next(iter(files.values())).dtype

    def without_memory(num_ranks: int) -> dict[str, Tensor]:
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes(num_ranks).items()}

    whole = without_memory(1)
    views = trace_loading(lambda read: load(whole, read, 0, 1), whole, layouts)
    assert views.keys() == files.keys()
    parts: list[Mapping[str, list[Part]]] = []
    held: list[dict[str, Tensor]] = []
    for rank in range(NUM_RANKS):
        own = without_memory(NUM_RANKS)
        found = trace_parts(lambda read, own=own, rank=rank: load(own, read, rank, NUM_RANKS), own, layouts)  # type: ignore[misc]
        parts.append({name: found.get(name, []) for name in files})
        held.append({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes(NUM_RANKS).items()})
        load(held[-1], files.items(), rank, NUM_RANKS)
    return [StandIns(views, parts, own) for own in held], held


def put_together(of_ranks: list[Divided], dtype: torch.dtype) -> Tensor:
    """A parameter, of what all ranks send."""
    sent = [torch.cat([of_rank.blocks[at] for of_rank in of_ranks]) for at in range(len(of_ranks[0].blocks))]
    whole = torch.zeros(of_ranks[0].shape, dtype=dtype)
    for of_rank in of_ranks:  # each knows how
        whole.zero_()
        of_rank.fill(whole, sent)
    return whole


@pytest.mark.parametrize("case", CASES)
def test_a_parameter_is_put_together_of_the_parts_of_all_ranks(case: str) -> None:
    load, shapes, file_shapes, make = CASES[case]
    files = {name: torch.randn(shape) for name, shape in file_shapes.items()}
    stand_ins, _ = traced(load, shapes, files)
    made = []
    for of_rank in stand_ins:
        tensors = of_rank.tensors()
        with JoinedViews(tensors):
            parameters = make(tensors)  # type: ignore[operator]
        assert all(of_rank.has(parameter) for parameter in parameters.values())
        made.append({name: of_rank.find(parameter) for name, parameter in parameters.items()})
        of_rank.require_all_found("a model")
    for name, wanted in make(files).items():  # type: ignore[operator]
        assert put_together([of_rank[name] for of_rank in made], torch.float32).equal(wanted), name


def test_experts_are_copied_all_at_once_and_no_number_is_sent_in_vain() -> None:
    load, shapes, file_shapes, _ = CASES["experts one by one"]
    stand_ins, held = traced(load, shapes, {name: torch.randn(shape) for name, shape in file_shapes.items()})
    tensors = stand_ins[1].tensors()
    with JoinedViews(tensors):
        gate_up = join_experts(tensors)["gate_up"]
    found = stand_ins[1].find(gate_up)
    assert len(found.copies) == NUM_RANKS
    (block,) = found.blocks
    assert block.numel() == held[1]["w13"].numel() and block.data_ptr() == held[1]["w13"].data_ptr()


def test_a_matrix_in_fp8_is_put_together_with_its_scales() -> None:
    num_rows, num_columns = 512, 40

    def load(own: Own, files: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int) -> None:
        rows, columns = cut(torch.arange(num_rows), 0, rank, num_ranks), torch.arange(num_columns)
        for _, tensor in files:
            copy_part(tensor, (num_rows, num_columns), rows, columns, own["weight"])

    weight, scales = torch.randn(num_rows, num_columns).to(torch.float8_e4m3fn), torch.rand(4, 1)
    files = {"weight": packed(weight, scales)}

    def shapes(num_ranks: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (packed_bytes(num_rows // num_ranks, num_columns),)}

    def load_whole(own: Own, read: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int) -> None:
        if num_ranks == 1:
            own["weight"].copy_(next(iter(read))[1])
        else:
            load(own, read, rank, num_ranks)

    stand_ins, _ = traced(load_whole, shapes, files)
    found = put_together([one.find(one.tensors()["weight"]) for one in stand_ins], torch.uint8)
    like = torch.empty(num_rows, num_columns)
    assert unpack(found, like).equal(unpack(files["weight"], torch.empty_like(like)))


def test_what_is_computed_of_stand_ins_is_refused_by_name() -> None:
    load, shapes, file_shapes, _ = CASES["attention"]
    stand_ins, _ = traced(load, shapes, {name: torch.randn(shape) for name, shape in file_shapes.items()})
    tensors = stand_ins[0].tensors()
    assert not stand_ins[0].has(tensors["q"] + 1)
    for name in ("k", "o"):
        stand_ins[0].find(tensors[name])
    with pytest.raises(BackendFailed, match="a model: the trainer has q otherwise than the engine; start with --base-"):
        stand_ins[0].require_all_found("a model")


def test_a_parameter_of_which_ranks_have_not_all_is_refused() -> None:
    load, shapes, file_shapes, _ = CASES["attention"]
    stand_ins, _ = traced(load, shapes, {name: torch.randn(shape) for name, shape in file_shapes.items()})
    of_some = StandIns(stand_ins[0]._views, stand_ins[0]._parts[:3], stand_ins[0]._held)
    with pytest.raises(BackendFailed, match="the ranks of the engine have not all of o between them"):
        of_some.find(of_some.tensors()["o"])
