"""docs/hardware.md says what the memory plan says."""

import pytest

from tests import hardware_page
from tests.published import COOKBOOK, NOT_FOUND
from tests.shapes import shape

PARAMETERS = {
    "meta-llama/Llama-3.2-1B": 1.24e9,
    "meta-llama/Llama-3.2-3B": 3.21e9,
    "meta-llama/Llama-3.1-8B": 8.03e9,
    "meta-llama/Llama-3.1-70B": 70.6e9,
    "Qwen/Qwen3-4B-Instruct-2507": 4.0e9,
    "Qwen/Qwen3-8B": 8.2e9,
    "Qwen/Qwen3-32B": 32.8e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 235e9,
    "openai/gpt-oss-20b": 20.9e9,
    "openai/gpt-oss-120b": 116.8e9,
}
"""As the models' cards state them, where these count what the plan counts."""


@pytest.mark.timeout(900)
def test_the_page_of_hardware_is_what_the_plan_says() -> None:
    assert hardware_page.PAGE.read_text() == hardware_page.page(), "run `make hardware`"


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_a_published_config_has_the_parameters_that_its_card_states(name: str, parameters: float) -> None:
    assert shape(name).numbers.base == pytest.approx(parameters, rel=0.006)


def test_every_model_of_the_cookbook_is_in_the_table_or_named_beside_it() -> None:
    words = hardware_page.PAGE.read_text().replace(",", " ").replace(".\n", "\n").split()
    assert not {name.partition("/")[2] for name in (*COOKBOOK, *NOT_FOUND)} - set(words)
