"""What is imported for forks begins neither CUDA nor threads.

pytest tests/gpu/test_forks.py -s
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.specs import tiny_spec
from tinker_server.backends.processes import launcher

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("module", launcher.FORKED)
def test_libraries_of_a_process_begin_no_cuda_while_they_are_imported(module: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    spec = dataclasses.replace(tiny_spec(tmp_path), device="cuda")
    env = launcher._for_vllm(spec, (0,)) if "engine" in module else launcher._for_device(spec, (0,))
    program = "import sys; from tinker_server.backends.processes.forking import *; print(reason_against(*sys.argv[1:]))"
    command = [sys.executable, "-c", program, *launcher.modules_before(module, env)]
    found = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    assert found.stdout.strip().splitlines()[-1] == "None", found.stdout + found.stderr
