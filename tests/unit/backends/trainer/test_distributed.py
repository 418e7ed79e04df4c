"""Errors on one rank; agreement between ranks is tested in tests/contract/test_agreement.py."""

import pytest
import torch

from tinker_server.backends.protocol import BackendFailed, InvalidInput
from tinker_server.backends.trainer.distributed import World, agreed, agreed_each

ALONE = World(0, 1, torch.device("cpu"))


def failing(error: Exception) -> None:
    raise error


def test_of_several_actions_those_that_fail_give_errors_and_the_others_return() -> None:
    values, errors = agreed_each(
        {
            "good": lambda: 1,
            "wrong": lambda: failing(InvalidInput("datum 0")),
            "broken": lambda: failing(KeyError("x")),
        },
        ALONE,
    )
    assert values == {"good": 1}
    assert isinstance(errors["wrong"], InvalidInput) and str(errors["wrong"]) == "datum 0"
    assert type(errors["broken"]) is BackendFailed and "KeyError" in str(errors["broken"])


def test_running_out_of_memory_fails_the_work_and_an_error_of_the_device_ends_the_process() -> None:
    with pytest.raises(BackendFailed, match="out of GPU memory"):
        agreed(lambda: failing(torch.OutOfMemoryError("tried to allocate 8 GiB")), ALONE)
    with pytest.raises(SystemExit, match="cannot be used any more"):
        agreed(lambda: failing(torch.AcceleratorError("CUDA error: device-side assert triggered")), ALONE)
