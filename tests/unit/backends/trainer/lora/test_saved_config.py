"""Every field of PEFT's own LoraConfig is decided: read, harmless, or refused by name if it is set."""

import dataclasses
import json
from pathlib import Path

import pytest
from peft import LoraConfig

from tinker_server.api_schemas.adapter_names import NOT_FOR_PEFT
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, InvalidInput
from tinker_server.backends.trainer.lora.saved_config import HARMLESS, ONLY, READ, SavedConfig, read_config

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def read(directory: Path, **fields: object) -> SavedConfig:
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(PLAIN | fields))
    return read_config(directory)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LoraConfig)])
def test_each_field_of_peft_is_read_or_harmless_or_refused(field: str) -> None:
    """A new PEFT's field fails here until someone says whether a product of A and B without it gives its numbers."""
    assert [field in one for one in (READ, HARMLESS, ONLY)].count(True) == 1


def test_what_peft_saves_of_a_plain_adapter_is_read(tmp_path: Path) -> None:
    LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    assert read_config(tmp_path) == SavedConfig(4, 8.0)
    peft = json.loads((tmp_path / ADAPTER_CONFIG_FILE).read_text())
    peft |= dict.fromkeys(sorted(peft.keys() - PLAIN.keys()))
    assert read(tmp_path, **peft) == SavedConfig(4, 8.0), "null is a field that is not set"


@pytest.mark.parametrize("field", sorted(HARMLESS))
def test_a_harmless_field_may_have_any_value(field: str, tmp_path: Path) -> None:
    assert read(tmp_path, **{field: {"any": ["value"]}}) == SavedConfig(4, 8.0)


@pytest.mark.parametrize("field", sorted(ONLY))
@pytest.mark.parametrize("value", [[1, 2], {"q_proj": 2}, "on", 7])
def test_a_field_that_asks_for_more_than_a_product_is_refused(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=rf"adapter_config\.json: {field} .* is not supported: "):
        read(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("fan_in_fan_out", True),
        ("ensure_weight_tying", True),
        ("kasa_config", {}),  # PEFT takes it for a config of defaults
        ("use_bdlora", {}),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "lora_ga"),
    ],
)
def test_a_switch_that_changes_numbers_is_refused(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=rf"adapter_config\.json: {field} "):
        read(tmp_path, **{field: value})


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_that_is_not_set_is_taken(value: object, tmp_path: Path) -> None:
    assert read(tmp_path, use_of_next_year=value) == SavedConfig(4, 8.0)


@pytest.mark.parametrize("value", [True, 0, 1, "x", [0], {"rank": 1}])
def test_an_unknown_field_that_is_set_is_refused_by_name(value: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"adapter_config\.json: 'use_of_next_year' .* is not known here"):
        read(tmp_path, use_of_next_year=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("r", None), ("r", 0), ("r", True), ("r", 4.0), ("lora_alpha", None), ("lora_alpha", 0), ("lora_alpha", "8")],
)
def test_a_rank_or_alpha_that_is_no_number_is_refused(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=rf"adapter_config\.json: {field} "):
        read(tmp_path, **{field: value})


@pytest.mark.parametrize("content", ["[" * 60_000, "[]", "", '{"r": '])
def test_what_is_no_config_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / ADAPTER_CONFIG_FILE).write_text(content)
    with pytest.raises(InvalidInput, match=r"adapter_config\.json"):
        read_config(tmp_path)


def test_files_of_tinkers_tools_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, peft_type=NOT_FOR_PEFT, target_modules="all-linear") == SavedConfig(4, 8.0)
