"""Our own kernels on CUDA: against the plain operations that they stand for.

pytest tests/gpu
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

from tests import delta_rule
from tests.models import make_tiny_internvl
from tests.tries import STATES, paths_of
from tinker_server.backends.families.processors import ImageProcessor
from tinker_server.backends.formats.block_fp8 import dequantised, multiply, packed, unpack
from tinker_server.backends.kernels import log_softmax
from tinker_server.backends.kernels.carried_state import tables
from tinker_server.backends.kernels.delta_rule import CHUNK, chunk_indices, packed_delta_rule
from tinker_server.backends.kernels.delta_rule_gradients import of_queries_and_keys
from tinker_server.backends.kernels.rotary import rotate
from tinker_server.backends.sampler.engine.vllm_patches.float32_residual import add_and_norm
from tinker_server.backends.trainer.lora.grouped import _add_grouped_product
from tinker_server.backends.trainer.lora.linear import add_product, apply_scales

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [64, 2560, 2049])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_engines_norm_adds_in_float32_and_rounds_once(width, kind):
    torch.manual_seed(0)
    x, weight = torch.randn(37, width).bfloat16(), torch.randn(width).bfloat16()
    residual = (10 * torch.randn(37, width)).to(kind)
    expected_norm, expected_sum = add_and_norm(x, residual, weight, 1e-6)
    on_device = residual.cuda()
    normed, summed = add_and_norm(x.cuda(), on_device, weight.cuda(), 1e-6)
    assert (summed.data_ptr() == on_device.data_ptr()) == (kind == torch.float32)
    torch.testing.assert_close(summed.cpu(), expected_sum, rtol=0, atol=0)
    assert (normed.cpu() == expected_norm).float().mean() > 0.99
    torch.testing.assert_close(normed.cpu(), expected_norm, rtol=2**-7, atol=0)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 8), (517, 24), (3000, 256)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_one_model", [False, True])
@pytest.mark.parametrize("linears", [1, 3])
def test_scales_of_a_microbatch_are_bitwise_equal_and_zero_stays_zero(tokens, columns, kind, of_one_model, linears):
    torch.manual_seed(0)
    product = torch.randn(tokens, linears * columns).to(kind)
    scales = torch.randn(1 if of_one_model else tokens, columns) * torch.randint(0, 2, (columns,))
    product[0, scales[0].repeat(linears) == 0] = torch.nan  # of another model, which has diverged
    assert torch.equal(apply_scales(product.cuda(), scales.cuda()).cpu(), apply_scales(product.clone(), scales))


@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 320), (37, 4097), (700, 151936)])
def test_what_scoring_makes_of_logits_is_as_in_double_precision(tokens, vocabulary):
    torch.manual_seed(0)
    logits = 20 * torch.randn(tokens, vocabulary, device="cuda")
    exact = logits.double().logsumexp(-1, keepdim=True)
    lse = log_softmax.normaliser(logits)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=1e-5)
    weights = torch.randn(tokens, 1, device="cuda")
    expected = -(logits.double() - lse.double()).exp() * weights.double()
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        found = log_softmax.probabilities(logits, lse, weights, dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-30)


def test_logits_that_are_not_finite_are_not_hidden():
    logits = torch.randn(3, 5000, device="cuda")
    logits[0, 4999], logits[1, 3] = torch.nan, torch.inf
    assert log_softmax.normaliser(logits).isfinite().flatten().tolist() == [False, False, True]


@pytest.mark.parametrize("shape", [(128, 128), (1024, 4096), (130, 140), (7, 300), (257, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_dequantised_to_the_bit_as_on_the_host(shape, dtype):
    made = torch.Generator().manual_seed(0)
    weight_NK = (torch.randn(shape, generator=made) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale_IJ = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=made) / 100
    weight_B = packed(weight_NK, scale_IJ)
    wanted = dequantised(weight_NK, scale_IJ, dtype)
    assert torch.equal(unpack(weight_B, torch.empty(shape, dtype=dtype)), wanted)
    assert torch.equal(unpack(weight_B.cuda(), torch.empty(shape, dtype=dtype, device="cuda")).cpu(), wanted)


@pytest.mark.parametrize("shape", [(128, 128), (1024, 4096), (130, 140), (7, 300), (257, 16), (8192, 28672)])
@pytest.mark.parametrize("rows", [1, 16, 33, 128, 300])
def test_a_product_with_fp8_is_that_of_the_dequantised_matrix(shape, rows):
    made = torch.Generator().manual_seed(0)
    weight_NK = (torch.randn(shape, generator=made) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale_IJ = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=made) / 100
    x_MK = torch.randn(rows, shape[1] + 8, generator=made).bfloat16().cuda()[:, 8:]  # a view, as a layer may pass
    wide = torch.full((rows, shape[0] + 24), torch.nan, dtype=torch.bfloat16, device="cuda")
    multiply(x_MK, packed(weight_NK, scale_IJ).cuda(), wide[:, 8:-16])
    exact = x_MK.double() @ dequantised(weight_NK, scale_IJ, torch.bfloat16).cuda().double().T
    assert wide[:, :8].isnan().all() and wide[:, -16:].isnan().all()
    torch.testing.assert_close(wide[:, 8:-16].double(), exact, rtol=2**-8, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_of_every_channel_is_normalised_as_on_the_host(tmp_path, dtype):
    processor = ImageProcessor(str(make_tiny_internvl(tmp_path / "model")), crop_to_patches=True)
    values = torch.arange(256, dtype=torch.uint8).repeat(5, 3)
    assert torch.equal(processor.normalise(values.cuda(), dtype).cpu(), processor.normalise(values, dtype))


@pytest.mark.parametrize(("heads", "size"), [(16, 64), (16, 72), (16, 80), (3, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_and_keys_are_rotated_to_the_bit_as_transformers_does_and_so_are_their_gradients(heads, size, dtype):
    torch.manual_seed(0)
    angles = 30 * torch.randn(500, size // 2, device="cuda").repeat(1, 2)
    qkv, weights = torch.randn(2, 500, 3 * heads * size, device="cuda").to(dtype)

    def plain(qkv_PX):
        query, key, value = qkv_PX.view(500, 3, heads, size).unbind(1)
        rotated = apply_rotary_pos_emb_vision(query, key, angles.cos(), angles.sin())
        return torch.stack([*rotated, value], 1).flatten(1)

    found = []
    for function in (plain, lambda qkv_PX: rotate(qkv_PX.clone(), angles.cos(), angles.sin())):
        leaf = qkv.clone().requires_grad_()
        rotated = function(leaf)
        found.append((rotated, *torch.autograd.grad((rotated * weights).sum(), leaf)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("width", [8, 16, 32, 40, 64, 128, 256])
@pytest.mark.parametrize("outputs", [128, 1024, 2560, 4096, 9728])
def test_no_token_is_left_out_of_a_product_over_a_microbatchs_tokens(width, outputs):
    """The inputs are small whole numbers, whose sums are exact in float32."""
    torch.manual_seed(0)
    left = torch.randint(-1, 2, (16_500, width), device="cuda").bfloat16()
    right = torch.randint(-1, 2, (16_500, outputs), device="cuda").bfloat16()
    lengths = {size + left for size in (64, 1024, 2048, 4096, 8192, 12288, 14592, 16320) for left in range(64)}
    for num_tokens in sorted(lengths):
        total = torch.zeros(width, outputs, device="cuda")
        add_product(total, left[:num_tokens], right[:num_tokens])
        assert torch.equal(total, left[:num_tokens].float().T @ right[:num_tokens].float()), num_tokens


@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("outputs", [768, 2048])
def test_no_token_is_left_out_of_the_products_over_each_experts_tokens(width, outputs):
    """Experts of no tokens, of few, and of some that are left for a last step of 64; sums are exact in bfloat16."""
    torch.manual_seed(0)
    counts = [0, 1, 2, 3, 63, 64, 0, *(base + left for base in (64, 128, 1024) for left in range(8)), 0]
    left = torch.zeros(sum(counts), width, dtype=torch.bfloat16, device="cuda")
    for part in left.split(counts):
        part[-64:] = 1
    right = torch.randint(-1, 2, (sum(counts), outputs), device="cuda").bfloat16()
    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    total = torch.zeros(len(counts), width, outputs, device="cuda")
    _add_grouped_product(total, left, right, ends)
    for expert, (rows, others) in enumerate(zip(left.split(counts), right.split(counts), strict=True)):
        assert torch.equal(total[expert], rows.float().T @ others.float()), counts[expert]


LENGTHS = {
    "every edge": [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1],
    "one token": [1],
    "many of one token": [1] * 40,
    "long and short": [700, 1, 3, 1500, 2],
}


def of_delta_rule(lengths: list[int], heads: int, size: int, width: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Inputs of packed samples, the gradient of their output, and where samples begin."""
    made, total = torch.Generator("cuda").manual_seed(sum(lengths)), sum(lengths)

    def random(*shape: int) -> Tensor:
        return torch.randn(total, heads, *shape, device="cuda", generator=made)

    units = [F.normalize(random(size), dim=-1).bfloat16() for _ in range(2)]
    inputs = [*units, random(width).bfloat16(), -random().abs(), random().sigmoid().bfloat16()]
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    return [one.requires_grad_() for one in inputs], random(width).bfloat16(), bounds


def by_recurrence(inputs: list[Tensor], grad_THV: Tensor) -> list[Tensor]:
    """Output and gradients of one sample, token by token in float64 (equation 10 of arXiv 2412.06464)."""
    query, key, value, decay, beta = wide = [one.detach().double().requires_grad_() for one in inputs]
    state, outputs = query.new_zeros(*query.shape[1:], value.shape[2]), []
    for q, k, v, kept, rate in zip(query, key, value, decay.exp(), beta, strict=True):
        state = state * kept[:, None, None]
        known = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, (v - known) * rate[:, None])
        outputs.append(torch.einsum("hk,hkv->hv", q * q.shape[-1] ** -0.5, state))
    out = torch.stack(outputs)
    return [out, *torch.autograd.grad(out, wide, grad_THV.double())]


@pytest.mark.parametrize(("heads", "size", "width"), [(4, 128, 128), (2, 64, 128), (3, 16, 16)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_each_packed_sample_has_a_state_of_its_own(lengths, heads, size, width):
    inputs, grad_THV, bounds = of_delta_rule(lengths, heads, size, width)
    out, *_ = packed_delta_rule(*inputs, bounds)
    found = [out, *torch.autograd.grad(out, inputs, grad_THV)]
    for begin, end in pairwise(bounds.tolist()):
        wanted = by_recurrence([one[begin:end] for one in inputs], grad_THV[begin:end])
        for name, part, whole in zip("oqkvgb", (one[begin:end].double() for one in found), wanted, strict=True):
            # A single token's decay changes nothing.
            assert (part - whole).norm() < 0.02 * whole.norm() + 2e-3 * whole.numel() ** 0.5, (name, end - begin)


TRIES = {
    **{str(number): trie for number, trie in enumerate(STATES)},
    "long": ([300, 200, 1, 70, 64, 500, 3], [-1, 0, 0, 1, 1, -1, 5]),
    "more than a call has": ([130, *[2] * 70, *[66] * 2], [-1, *[0] * 70, 1, 1]),
}


@pytest.mark.parametrize(("lengths", "parents"), TRIES.values(), ids=TRIES)
def test_a_segment_begins_with_the_last_state_of_the_segment_before_it(lengths, parents):
    """Gradients are the sums of those of all samples that end with a segment, each by its own tokens alone."""
    inputs, grad_THV, bounds = of_delta_rule(lengths, 4, 128, 128)
    host = bounds.cpu()
    carried = tables(host.tolist(), parents)
    out, *_ = packed_delta_rule(*inputs, bounds, host, carried.parents_host, carried.calls.cuda())
    found = [out, *torch.autograd.grad(out, inputs, grad_THV)]
    wanted = [torch.zeros_like(one, dtype=torch.float64) for one in found]
    for path, length in zip(paths_of(lengths, parents), lengths, strict=True):
        own = grad_THV[path].clone()
        own[:-length] = 0
        of_path, *gradients = by_recurrence([one[path] for one in inputs], own)
        wanted[0][path[-length:]] = of_path[-length:]
        for total, part in zip(wanted[1:], gradients, strict=True):
            total[path] += part
    for begin, end in pairwise(bounds.tolist()):
        for name, part, whole in zip("oqkvgb", found, wanted, strict=True):
            difference = (part[begin:end].double() - whole[begin:end]).norm()
            assert difference < 0.02 * whole[begin:end].norm() + 2e-3 * whole[begin:end].numel() ** 0.5, (name, begin)


def within_chunks(lengths: list[int], heads: int, size: int, width: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """What `of_queries_and_keys` takes, in float32. Three more samples have no tokens; the states of chunks that are
    left over are not finite."""
    made, total = torch.Generator("cuda").manual_seed(sum(lengths)), sum(lengths)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=made)

    ends = torch.tensor([0, *lengths, 0, 0, 0], device="cuda").cumsum(0, dtype=torch.int32)
    bounds, indices = chunk_indices(ends, total)
    query, key = (F.normalize(random(total, heads, size), dim=-1) for _ in range(2))
    decay = -random(total, heads).abs()
    for begin, end in pairwise(ends.tolist()):
        for one in decay[begin:end].split(CHUNK):
            one.copy_(one.cumsum(0))
    new, grad, of_new = (random(total, heads, width) for _ in range(3))
    states, of_states = (0.3 * random(len(indices), heads, size, width) for _ in range(2))
    for one in (states, of_states):
        one[indices[:, 0] == len(bounds) - 2] = torch.nan
    return (query, key, new, decay, grad, of_new, states, of_states), bounds, indices


def in_16_bits(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """All but the decay."""
    return tuple(one if place == 3 else one.to(dtype) for place, one in enumerate(tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size", "width"), [(4, 128, 128), (2, 64, 128), (3, 16, 16), (2, 96, 48)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_gradients_of_queries_and_keys_within_chunks_are_those_of_plain_torch(lengths, heads, size, width, dtype):
    tensors, bounds, indices = within_chunks(lengths, heads, size, width)
    tensors = in_16_bits(tensors, dtype)
    found = of_queries_and_keys(tensors, bounds, indices, CHUNK)
    assert [one.dtype for one in found] == [dtype, torch.float32, dtype, torch.float32]
    expected = delta_rule.of_queries_and_keys(tensors, bounds, indices)
    for name, one, other in zip(("query", "key", "w", "decay"), found, expected, strict=True):
        for begin, end in pairwise(bounds.tolist()):
            part, whole = one[begin:end].double(), other[begin:end].double()
            # Rounding to bfloat16 makes 0.0017. A score may be rounded to its other neighbour.
            assert (part - whole).norm() <= 5e-3 * whole.norm() + 1e-5 * whole.numel() ** 0.5, (name, end - begin)


@pytest.mark.parametrize("not_finite", [torch.nan, torch.inf])
def test_gradients_within_chunks_of_a_sample_that_is_not_finite_leave_others_as_they_are(not_finite):
    tensors, bounds, indices = within_chunks([70, 3, 65, 200], 4, 128, 128)
    tensors = in_16_bits(tensors, torch.bfloat16)
    expected = of_queries_and_keys(tensors, bounds, indices, CHUNK)
    for one in tensors[:6]:
        one[70:73] = not_finite
    for one in tensors[6:]:
        one[indices[:, 0] == 1] = not_finite
    others = torch.ones(338, dtype=torch.bool, device="cuda")
    others[70:73] = False
    for one, other in zip(of_queries_and_keys(tensors, bounds, indices, CHUNK), expected, strict=True):
        assert torch.equal(one[others], other[others])
        assert not one[~others].isfinite().any()


def test_a_packed_sample_that_is_not_finite_leaves_others_as_they_are():
    inputs, grad_THV, bounds = of_delta_rule([70, 3, 65, 200], 4, 128, 128)
    expected, *_ = packed_delta_rule(*inputs, bounds)
    wanted = torch.autograd.grad(expected, inputs, grad_THV)
    with torch.no_grad():
        for one in inputs:
            one[70:73] = torch.nan
    out, *_ = packed_delta_rule(*inputs, bounds)
    others = torch.ones(338, dtype=torch.bool, device="cuda")
    others[70:73] = False
    for one, other in zip([out, *torch.autograd.grad(out, inputs, grad_THV)], [expected, *wanted], strict=True):
        assert torch.equal(one[others], other[others])


def test_a_graph_of_the_delta_rule_serves_samples_of_any_lengths():
    """Those that are left over have no tokens, as in the trainer's graphs."""
    held, held_grad, _ = of_delta_rule([338], 4, 128, 128)
    bounds = torch.full((41,), 338, dtype=torch.int32, device="cuda")
    bounds[0] = 0

    def run() -> list[Tensor]:
        out, *_ = packed_delta_rule(*held, bounds)
        return [out, *torch.autograd.grad(out, held, held_grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    for lengths in ([338], [1] * 38 + [300], [64, 64, 64, 64, 82], [337, 1]):
        inputs, grad_THV, of_lengths = of_delta_rule(lengths, 4, 128, 128)
        with torch.no_grad():
            for one, other in zip([*held, held_grad], [*inputs, grad_THV], strict=True):
                one.copy_(other)
            bounds.fill_(338)[: len(of_lengths)] = of_lengths
        graph.replay()
        out, *_ = packed_delta_rule(*inputs, of_lengths)
        eager = [out, *torch.autograd.grad(out, inputs, grad_THV)]
        assert all(torch.equal(one, other) for one, other in zip(replayed, eager, strict=True))
