"""Starts and deaths of a server on one GPU, with the phases that the log names: the first start, the trainer killed,
the engine killed, the second start. About 5 minutes for 4 billion weights.

    python benchmarks/starts.py [--shape 4b] [--model DIRECTORY] [--server OPTIONS]
"""

import argparse
import os
import shlex
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu import RANK
from benchmarks.gpu_server import NAME, first_answer, prepare, recover
from benchmarks.shapes import SHAPES
from tests.servers import Server


def main() -> None:
    """Run all in succession."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="4b")
    parser.add_argument("--model", type=Path, help="directory of the weights, made if it is not there")
    parser.add_argument("--server", default="", help="more options of the server")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or Path(folder) / "model"
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
            other.submit(prepare, model, SHAPES[given.shape]).result()
        server = Server(Path(folder) / "data", {NAME: model}, "--device", "cuda", *shlex.split(given.server))
        server.patience_s = 600
        try:
            first_answer(server, "first")
            recover(server, server.client().create_lora_training_client(NAME, rank=RANK).result())
            server.stop()
            first_answer(server, "second")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
