"""What several machines would move and how long that would take, computed: nothing here is measured.

    python benchmarks/many_machines.py [--machines 16] [--gpus H200:8] [--rank 32]

Bytes are those of the memory plan. Seconds are bytes over the rate of one machine's link, so lower bounds.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.shapes import shape
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.gpus import cards
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.configure.model_size import ModelSize
from tinker_server.backends.configure.placement import make_plan
from tinker_server.backends.protocol import BackendFailed

GIB = 1 << 30
NAMES = ("30b-a3b", "235b-a22b")
GBITS = (10, 100, 400)


def plan(size: ModelSize, gpus: str, rank: int) -> str:
    """What one machine of these GPUs serves."""
    names, sizes = zip(*cards(gpus), strict=True)
    try:
        found = make_plan([size], BackendConfig(max_lora_rank=rank), Machine(0, sizes, names), "cuda")  # type: ignore[arg-type]
    except BackendFailed as error:
        return f"refused: {error}"
    layout = found.layouts[size.name]
    whole = "a whole base each" if layout.replicates else "the base between them"
    return f"trainer on GPUs {layout.trainer} ({whole}), engines on {layout.engines}"


def moved(size: ModelSize, num_machines: int, rank: int) -> dict[str, int]:
    """Bytes that leave the busiest machine, by their purpose."""
    others, adapter = num_machines - 1, size.adapter_numbers(rank) * size.number_bytes
    return {
        "base, from the server to each other machine, once": others * size.base_bytes,
        "adapter, once to each other machine": others * adapter,
        "gradient in bfloat16, around a ring of machines": 2 * others * 2 * size.adapter_numbers(rank) // num_machines,
        "gradient in float32": 2 * others * 4 * size.adapter_numbers(rank) // num_machines,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--machines", type=int, default=16)
    parser.add_argument("--gpus", default="H200:8")
    parser.add_argument("--rank", type=int, default=32)
    arguments = parser.parse_args()
    for name in NAMES:
        size = shape(name)
        adapter = size.adapter_numbers(arguments.rank) * size.number_bytes
        print(
            f"\n{name}: base {size.base_bytes / GIB:.1f} GiB, adapter of rank {arguments.rank} {adapter / GIB:.2f} GiB"
        )
        print(f"one machine of {arguments.gpus}: {plan(size, arguments.gpus, arguments.rank)}")
        print("| bytes that leave the busiest machine | GiB |", " | ".join(f"{g} Gbit/s" for g in GBITS), "|")
        for purpose, size_bytes in moved(size, arguments.machines, arguments.rank).items():
            seconds = " | ".join(f"{8 * size_bytes / (gbit * 1e9):.2f} s" for gbit in GBITS)
            print(f"| {purpose} | {size_bytes / GIB:.2f} | {seconds} |")


if __name__ == "__main__":
    main()
