"""The names that recipes have by default, served as what they name: random models of the true architecture."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.acceptance.recipes import PYTHON, Cookbook
from tests.models import make_tiny_qwen3_5, make_tiny_vl
from tests.published import COOKBOOK, NOT_FOUND
from tests.servers import Server

DEFAULT = "Qwen/Qwen3.5-397B-A17B"
"""Models that the image classifier trains by default."""
NAMED = "Qwen/Qwen3-VL-30B-A3B-Instruct"
NEAR = {DEFAULT: 0.2, NAMED: 1e-4}
"""nats, of any token: on a CPU the first computes in bfloat16, the second in float32."""
BETWEEN_MESHES = 0.05
"""nats, of a step's mean loss in bfloat16."""


@pytest.fixture(scope="module")
def server_of_true_models(
    cookbook_of_session: Cookbook, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cookbook]:
    """Random models under the true names, and the photographs of the other server's folder."""
    folder = tmp_path_factory.mktemp("true") / "folder"
    models = {
        DEFAULT: make_tiny_qwen3_5(folder / DEFAULT, moe=True, linear_num_key_heads=2, linear_num_value_heads=4),
        NAMED: make_tiny_vl(folder / NAMED, moe=True),
    }
    for directory in models.values():  # the renderers of Qwen3.5 want each of these to be one token
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.add_tokens(["<think>", "</think>"])
        tokenizer.save_pretrained(directory)
    (folder / "dpdl-benchmark").symlink_to(cookbook_of_session.folder / "dpdl-benchmark")
    yield from serve(folder, models)


def serve(folder: Path, models: dict[str, Path], *options: str) -> Iterator[Cookbook]:
    """Serve models of a folder to its recipes."""
    server = Server(folder.parent / f"data{len(options)}", models, *options).start()
    yield Cookbook(folder, server)
    assert server.stop() == 0, server.log.read_text()[-4000:]


@pytest.fixture
def divided_cookbook(server_of_true_models: Cookbook) -> Iterator[Cookbook]:
    """The recipes' own model, with two ranks of its trainer and its engine divided over two."""
    folder = server_of_true_models.folder
    yield from serve(folder, {DEFAULT: folder / DEFAULT}, "--ranks", "2", "--tensor-parallel", "2")


@pytest.fixture
def true_cookbook(server_of_true_models: Cookbook) -> Cookbook:
    """With its clock set back."""
    server_of_true_models.spent_s, server_of_true_models.steps = 0.0, 0
    return server_of_true_models


@pytest.mark.parametrize(
    "arguments",
    [[], [f"model_name={NAMED}", "renderer_name=qwen3_vl_instruct"]],
    ids=["the recipe's own model", "Qwen3-VL-30B-A3B"],
)
def test_vlm_classifier_at_its_defaults(true_cookbook: Cookbook, shows, arguments: list[str]) -> None:
    """Random weights learn no more than how an answer looks."""
    losses = classify(true_cookbook, *arguments)
    assert losses[-1] < 0.9 * losses[0]
    model = arguments[0].removeprefix("model_name=") if arguments else DEFAULT
    shows(
        f"vlm_classifier.train at its defaults, random {model}",
        f"train NLL {losses[0]:.2f} -> {losses[-1]:.2f}",
        true_cookbook,
    )


def test_vlm_classifier_learns_on_a_divided_model_as_on_a_whole_one(
    true_cookbook: Cookbook, divided_cookbook: Cookbook, shows
) -> None:
    whole, divided = (classify(cookbook) for cookbook in (true_cookbook, divided_cookbook))
    assert divided[-1] < 0.9 * divided[0]
    np.testing.assert_allclose(divided, whole, rtol=0, atol=BETWEEN_MESHES)
    distance = np.abs(np.subtract(divided, whole)).max()
    shows(
        f"vlm_classifier.train at its defaults, random {DEFAULT}, trainer and engine of two ranks",
        f"train NLL {divided[0]:.2f} -> {divided[-1]:.2f}, {distance:.4f} from those of one rank",
        divided_cookbook,
    )


def classify(cookbook: Cookbook, *arguments: str) -> list[float]:
    """Train the image classifier at its defaults, and resume it; return its losses."""
    directory = cookbook.new_folder("vlm")
    cookbook.run("vlm_classifier.train", f"experiment_dir={directory}", "dataset=caltech101", *arguments)
    (log_dir,) = (path.parent for path in directory.rglob("metrics.jsonl"))
    run = cookbook.run(
        "vlm_classifier.train",
        f"experiment_dir={directory}",
        "behavior_if_log_dir_exists=resume",
        *arguments,
        log_dir=log_dir,
    )
    return run.column("train_mean_nll")


@pytest.mark.parametrize("name", [DEFAULT, NAMED])
def test_adapters_of_experts_are_built_and_merged_by_the_cookbooks_tools(
    true_cookbook: Cookbook, shows, tmp_path: Path, name: str
) -> None:
    """And score, reloaded, as the trainer does."""
    token_ids = [int(token) for token in np.random.default_rng(1).integers(0, 300, 40)]
    path, expected = train(true_cookbook.server.client(), name, token_ids)
    raw, adapter, merged = (tmp_path / name for name in ("raw", "adapter", "merged"))
    call = f"from tinker_cookbook import weights as w; w.download(tinker_path={path!r}, output_dir={str(raw)!r})"
    files = f"base_model={name!r}, adapter_path={str(raw)!r}, output_path="
    call += f"; w.build_lora_adapter({files}{str(adapter)!r})"
    call += f"; w.build_hf_model({files}{str(merged)!r}, dtype='float32')"
    true_cookbook.call([PYTHON, "-c", call])
    base = AutoModelForImageTextToText.from_pretrained(true_cookbook.folder / name, dtype=torch.float32)
    reloaded = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32)
    distances = {"base": distance(base, token_ids, expected), "merged": distance(reloaded, token_ids, expected)}
    said = ", ".join(f"{which} {value:.0e}" for which, value in distances.items())
    assert distances["base"] > 0.3, "the weights are those of the base"
    assert distances["merged"] < NEAR[name], said
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert sum(".mlp.experts.7.down_proj.lora_B." in tensor for tensor in tensors) == 2  # layers
    shows(
        f"weights.build_lora_adapter, build_hf_model, experts of {name}",
        f"distances to the trainer: {said}",
        true_cookbook,
    )


NAMES = """
from tinker_cookbook import model_info
infos = [getattr(model_info, name)() for name in dir(model_info) if name.startswith("get_") and name.endswith("_info")]
print(*(f"{one.organization}/{name}" for info in infos for name, one in info.items()))
"""


@pytest.mark.quick
def test_the_page_of_hardware_has_every_model_that_the_cookbook_names() -> None:
    said = subprocess.run([PYTHON, "-c", NAMES], capture_output=True, text=True, check=True).stdout
    assert {*said.split()} == {*COOKBOOK, *NOT_FOUND}


def distance(model: torch.nn.Module, token_ids: list[int], expected: np.ndarray) -> float:
    """The largest difference of a token's log probability, in nats."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([token_ids])).logits[0]
    got = logits_TV.log_softmax(-1)[:-1].gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()
    return float(np.abs(got - expected).max())


def train(service: tinker.ServiceClient, name: str, token_ids: list[int]) -> tuple[str, np.ndarray]:
    """Return the path of saved weights that differ from the base, in experts too, and their scores of the tokens."""
    training = service.create_lora_training_client(base_model=name, rank=4).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(token_ids[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(token_ids[1:])),
            "weights": types.TensorData.from_numpy(np.ones(len(token_ids) - 1, np.float32)),
        },
    )
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.02)).result()
    path = training.save_state("last").result().path
    (output,) = training.forward([datum], "cross_entropy").result().loss_fn_outputs
    return path, output["logprobs"].to_numpy()
