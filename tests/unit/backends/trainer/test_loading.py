"""A rank says how far it has loaded its base model."""

from pathlib import Path

import torch

from tests.trainers import config
from tinker_server.backends.processes.progress import Progress
from tinker_server.backends.protocol import Loading
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank


def test_a_rank_counts_every_byte_of_its_files_and_says_what_comes_next(tiny_vl: Path) -> None:
    shown: list[Loading] = []
    TrainerRank(config(tiny_vl), World(0, 1, torch.device("cpu")), progress=Progress(shown.append))
    reading = [one for one in shown if one.doing == "reads weights"]
    files = sum(file.stat().st_size for file in tiny_vl.glob("*.safetensors"))
    assert reading[0].done_bytes == 0 and 0.9 * files < reading[0].total_bytes <= files
    assert reading[-1].done_bytes == reading[-1].total_bytes
    assert shown[-1] == Loading("tests the model")
