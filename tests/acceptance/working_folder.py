"""The folder that recipes run in: models and datasets under the names that they ask the hub for.

    python working_folder.py FOLDER TINY_VL CALTECH10_ZIP [CALTECH101_PARQUET_DIR]

Runs in the cookbook's environment. Transformers and datasets prefer a relative folder of the right name to the hub,
so that recipes run unchanged and offline. Texts are made here, a few dozen rows of each: enough for some steps.
"""

import csv
import io
import json
import random
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

MODELS = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-9B-Base",
    "Qwen/Qwen3.5-397B-A17B",
    "Qwen/Qwen3.6-27B",
    "Qwen/Qwen3.6-35B-A3B",
)
"""All names that the recipes know, of students, teachers, graders and opponents: one small model stands for each."""
CONTEXT = 8192
WORDS = [
    "river",
    "stone",
    "garden",
    "window",
    "bridge",
    "market",
    "forest",
    "morning",
    "letter",
    "island",
    "music",
    "engine",
    "silver",
    "harbour",
]


def main(folder: Path, tiny_vl: Path, caltech10: Path, caltech101: Path | None = None) -> None:
    """Fill `folder`."""
    write_model(folder / "model", tiny_vl)
    for name in MODELS:
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / "model")
    embedded = folder / "tinker-server" / "tiny-vl"
    embedded.parent.mkdir()
    embedded.symlink_to(tiny_vl)
    write_texts(folder)
    photographs = folder / "dpdl-benchmark" / "caltech101"
    if caltech101 is not None:
        photographs.parent.mkdir()
        photographs.symlink_to(caltech101)
    else:
        write_photographs(photographs / "data", caltech10)


def write_model(directory: Path, tiny_vl: Path) -> None:
    """The embedded model with a longer context, for recipes that ask for 4096 tokens beyond their prompt.

    Its weights are in float32, so that what is merged into them is not rounded.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_vl, directory)
    for path in directory.glob("*.safetensors"):
        save_file({name: tensor.float() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    config["dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "model_max_length": CONTEXT}))


def sentence(number: int) -> str:
    """The same for the same number."""
    return "the " + " ".join(random.Random(number).sample(WORDS, 4))


def chat(number: int, turns: int = 1) -> list[dict[str, str]]:
    """A conversation of user and assistant."""
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Say {sentence(number + turn)}."})
        messages.append({"role": "assistant", "content": f"{sentence(number + turn).capitalize()}."})
    return messages


def write_texts(folder: Path) -> None:
    """One row shape for each dataset that a recipe names."""
    chats = [{"prompt": f"Say {sentence(i)}.", "messages": chat(i, 1 + i % 2)} for i in range(384)]
    write_jsonl(folder / "HuggingFaceH4" / "no_robots", {"train": chats[:256], "test": chats[256:]})
    write_jsonl(folder / "allenai" / "tulu-3-sft-mixture", {"train": chats})
    sums = [
        {"question": f"Tom has {i} pens and gets {i % 7}. How many has he?", "answer": f"Add them.\n#### {i + i % 7}"}
        for i in range(40)
    ]
    write_jsonl(folder / "openai" / "gsm8k", {"train": sums, "test": sums[:8]}, config="main")
    problems = [{"question": row["question"], "final_answer": row["answer"][-2:].strip()} for row in sums]
    write_jsonl(folder / "zwhe99" / "DeepMath-103K", {"train": problems})
    pairs = [
        {
            "chosen": f"\n\nHuman: Say {sentence(i)}.\n\nAssistant: {sentence(i)}.",
            "rejected": f"\n\nHuman: Say {sentence(i)}.\n\nAssistant: No.",
        }
        for i in range(96)
    ]
    write_jsonl(folder / "Anthropic" / "hh-rlhf", {"train": pairs[:80], "test": pairs[80:]})
    thoughts = [
        {
            "conversations": [
                {"from": "human", "value": sentence(i)},
                {"from": "gpt", "value": f"<think>\nI see.\n</think>\n\n{sentence(i)}"},
            ]
        }
        for i in range(64)
    ]
    write_jsonl(folder / "open-thoughts" / "OpenThoughts3-1.2M", {"train": thoughts})
    exam = [
        {
            "question": f"Which word ends: {sentence(i)}?",
            "choices": {"label": ["A", "B"], "text": [sentence(i).split()[-1], "none"]},
            "answerKey": "A",
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-2-choices",
        }
        for i in range(20)
    ]
    write_jsonl(folder / "hicai-zju" / "SciKnowEval", {"test": exam})
    graded = [
        {
            "orig_instruction": f"Say {sentence(i)}.",
            "orig_criteria": "Does the answer say all words?",
            **{f"orig_score{score}_description": f"{score - 1} of the words are said." for score in range(1, 6)},
            "orig_reference_answer": f"{sentence(i).capitalize()}.",
        }
        for i in range(32)
    ]
    write_jsonl(folder / "prometheus-eval" / "Feedback-Collection", {"train": graded})
    write_markets(folder / "markets.csv")
    write_tasks(folder / "self-distillation")
    pages = [
        {"text": f"{sentence(i)} until {sentence(i + 1)} after {sentence(i + 2)} before the night."} for i in range(400)
    ]
    write_jsonl(folder / "Salesforce" / "wikitext", {"train": pages}, config="wikitext-103-raw-v1")
    examples = folder / "tinker_cookbook" / "example_data"
    examples.mkdir(parents=True)
    (examples / "multilingual.txt").write_text("".join(f"{sentence(i)}\n" for i in range(24)))


def write_jsonl(directory: Path, splits: dict[str, Sequence[object]], config: str | None = None) -> None:
    """A dataset as a folder; `config` names its configuration."""
    (directory / "data").mkdir(parents=True)
    for split, rows in splits.items():
        (directory / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        files = "".join(f"  - split: {split}\n    path: data/{split}.jsonl\n" for split in splits)
        (directory / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


def write_markets(path: Path) -> None:
    """Questions about the future with the columns of Prophet-Arena, half of them before the split of the recipes."""
    rows = []
    for i in range(48):
        month, word = ("09" if i < 32 else "11"), WORDS[i % len(WORDS)]
        rows.append(
            {
                "submission_id": f"s{i}",
                "event_ticker": f"E{i}",
                "title": f"Will the {word} open?",
                "snapshot_time": f"2025-{month}-01T00:00:00Z",
                "close_time": f"2025-{month}-{2 + i % 20:02}T00:00:00Z",
                "market_outcome": json.dumps({f"The {word} opens": i % 2}),
                "category": "Towns",
                "markets": json.dumps([f"The {word} opens"]),
                "sources": json.dumps([{"title": word, "summary": "It opens." if i % 2 else "It stays closed."}]),
            }
        )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_tasks(directory: Path) -> None:
    """The two tasks of continual self-distillation, as Arrow files: calls of tools, then questions of science."""
    import datasets

    tools = [
        {
            "prompt": f"Call a tool for {sentence(i)}.",
            "golden_response": [f"Action: {sentence(i)}"],
            "golden_answer": [],
        }
        for i in range(32)
    ]
    science = [
        {
            "messages": [{"role": "system", "content": "Choose."}, *chat(i)[:1]],
            "output_text": f"<reasoning>\n{sentence(i)}\n</reasoning>\n<answer>\nA\n</answer>",
            "prompt": chat(i)[:1],
            "answer": "A",
        }
        for i in range(32)
    ]
    for name, rows in (("tooluse_data", tools), ("science_data", science)):
        for part, taken in (("train_data", rows[:24]), ("eval_data", rows[24:])):
            datasets.Dataset.from_list(taken).save_to_disk(directory / name / part)


def write_photographs(directory: Path, archive: Path) -> None:
    """The demo's ten classes with the columns of dpdl-benchmark/caltech101."""
    import datasets
    from PIL import Image

    directory.mkdir(parents=True)
    with zipfile.ZipFile(archive) as source:
        members = sorted(name for name in source.namelist() if name.endswith(".jpg"))
        names = sorted({name.split("/")[1] for name in members})
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
        for split in ("train", "test"):
            taken = [name for name in members if name.split("/")[0] == split]
            rows = {
                "image": [Image.open(io.BytesIO(source.read(name))) for name in taken],
                "label": [names.index(name.split("/")[1]) for name in taken],
            }
            found = datasets.Dataset.from_dict(rows, features=features)
            found.to_parquet(directory / f"{split}-00000-of-00001.parquet")


if __name__ == "__main__":
    main(*(Path(one).resolve() for one in sys.argv[1:]))  # links hold where they lie
