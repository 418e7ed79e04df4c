"""A rank's shard of a parameter that the ranks of an engine have between them, for FSDP2 to all-gather.

FSDP2 cuts parameters evenly along a dimension. An engine cuts some along another, and those that have several parts, as
gates and ups, within each. So a shard here is a stand-in of FSDP2's shape: what is sent is the engine's own memory, and
a whole parameter is put together by copies (`base_weights/divided.py`).
"""

import torch
from torch import Tensor, nn

from tinker_server.backends.base_weights.divided import Divided


class HeldShard(Tensor):
    """The stand-in, known to FSDP2 by its two methods."""

    divided: Divided

    def fsdp_pre_all_gather(
        self, mesh: object, outer_size: object, outer_stride: object, module: nn.Module, policy: object
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return what this rank sends."""
        return tuple(self.divided.blocks), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Put the whole parameter together: in `out`, whose memory FSDP2 has given back in between, or anew."""
        first = all_gather_outputs[0]
        whole = first.new_empty(self.divided.shape, dtype=param_dtype) if out is None else out.detach()
        # As FSDP2 does: it has the same numbers again.
        with torch.autograd._unsafe_preserve_version_counter((whole,)):  # type: ignore[attr-defined]
            self.divided.fill(whole, all_gather_outputs)
        for sent in all_gather_outputs:  # which FSDP2 would keep as long as the parameter
            sent.untyped_storage().resize_(0)
        return (whole, (whole,)) if out is None else None


def stand_in(divided: Divided, num_ranks: int, device: torch.device) -> HeldShard:
    """Return a shard as large as the largest that FSDP2 would give to a rank; it has the memory of a number."""
    rows, *others = divided.shape
    number = torch.zeros((), dtype=divided.blocks[0].dtype, device=device)
    shard = number.expand(-(-rows // num_ranks), *others).as_subclass(HeldShard)
    shard.divided = divided
    return shard


def placeholder(shard: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter without memory by which FSDP2 knows the kind of its shards: `like`, unless that is this."""
    if not isinstance(shard, HeldShard):
        return like
    without_memory = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(HeldShard)
    return nn.Parameter(without_memory, requires_grad=False)
