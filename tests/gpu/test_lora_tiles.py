"""vLLM's two LoRA kernels with the tiles that are chosen here.

pytest tests/gpu/test_lora_tiles.py
"""

import pytest
import torch

from tinker_server.backends.sampler.engine.vllm_patches.lora_tiles import choose_tiles

pytestmark = pytest.mark.gpu
SLOTS = 5


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 33, 64, 65, 300, 600])
@pytest.mark.parametrize("rank", [8, 32, 128])
@pytest.mark.parametrize(("num_inputs", "outputs"), [(2560, (4096, 1024, 1024)), (320, (192,)), (9728, (2560,))])
def test_adapters_of_all_slots_are_added_to_their_tokens(num_tokens, rank, num_inputs, outputs, monkeypatch):
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    for module in (lora_shrink_op, lora_expand_op):
        monkeypatch.setattr(module, "get_lora_op_configs", choose_tiles)
    torch.manual_seed(0)
    slots_T = torch.randint(-1, SLOTS, (num_tokens,), dtype=torch.int32, device="cuda")
    slots_T[0] = 3
    meta = LoRAKernelMeta.make(SLOTS, num_tokens, "cuda")
    meta.prepare_tensors(slots_T)
    which = meta.meta_args(num_tokens, True)
    x, before = (torch.randn(num_tokens, size, device="cuda").bfloat16() for size in (num_inputs, sum(outputs)))
    a = [torch.randn(SLOTS, 1, rank, num_inputs, device="cuda").bfloat16() for _ in outputs]
    b = [torch.randn(SLOTS, 1, size, rank, device="cuda").bfloat16() for size in outputs]
    inner = torch.full((len(outputs), num_tokens, rank), torch.nan, device="cuda")
    found = before.clone()
    lora_shrink_op._lora_shrink(x, a, inner, *which, 0.5)
    lora_expand_op._lora_expand(inner, b, found, *which, 0, True)
    added = []
    for one_a, one_b in zip(a, b, strict=True):
        low_TR = 0.5 * torch.einsum("tk,trk->tr", x.double(), one_a[slots_T.long(), 0].double())
        added.append(torch.einsum("tr,tnr->tn", low_TR, one_b[slots_T.long(), 0].double()))
    wanted = before.double() + torch.cat(added, 1) * (slots_T >= 0)[:, None]
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=1e-2 * float(wanted.abs().max()))
