"""Half an hour of learning: four owners train two models side by side, by RL and by supervised fine-tuning.

    python examples/smollm2.py TEXT
    python benchmarks/long_run.py TEXT OUT [--minutes 30] [--device cuda]

| owner | model | work | learns |
|---|---|---|---|
| alice | TEXT | RL | answers of at most ten words |
| bob | TEXT | supervised | sums of two digits |
| carol | tiny-vl | RL, after some supervised steps | names of subjects in photographs |
| dan | tiny-vl | supervised | the same |

Writes OUT-turns.csv, a line for each step: its reward or loss, the tokens that were trained, and in RL the difference
between the trainer's log probabilities and the sampler's. Writes OUT-memory.csv every ten seconds: the memory of each
GPU and of each kind of process. Both are whole at any time, should it be stopped early. Prints both in short, and exits
with 1 if memory grows or an owner met an error.
"""

import argparse
import csv
import random
import sys
import tempfile
import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import tinker
from tinker import types
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from caltech10 import Conversation, Photo, load_photos, training_batch

from benchmarks.slopes import slope
from benchmarks.soak_readings import MIB, of_processes
from tests.servers import Server
from tinker_server.auth import keys
from tinker_server.backends.configure.gpus import all_gpus
from tinker_server.embedded import DIRECTORIES, TINY_VL

TEXT = "long-run/text"
RANK, BATCH, GROUP = 16, 16, 8
RATE = types.AdamParams(learning_rate=2e-4)
SAMPLE_S = 10.0
RESOLUTION_MIB = 16.0
"""Growth that is nothing: what allocators round on a GPU and beside it."""
SETTLED = 1 / 2
"""Part of the time after which memory is judged."""
WARM_LOSS, MOST_WARM_STEPS = 0.4, 300
"""Loss at which Carol goes on by rewards: then some answers are right."""
MAX_WORDS, MAX_TOKENS = 10, 48
TOPICS = ("rain", "the moon", "bread", "a bridge", "music", "the sea", "winter", "a clock", "honey", "trains")


@dataclass(frozen=True)
class Turn:
    """One step of an owner."""

    measured: float
    """The mean reward, or the loss in nats for a token with weight."""
    num_tokens: int
    """Tokens of the batch."""
    gap: float | None = None
    """Mean difference of log probabilities between trainer and sampler in nats; None without samples."""


class Work(Protocol):
    """What one owner does, step after step."""

    @abstractmethod
    def turn(self, number: int) -> Turn:
        """Take a step."""


def supervised(training: tinker.TrainingClient, data: Sequence[types.Datum]) -> Turn:
    """Take a step of cross entropy."""
    passed, stepped = training.forward_backward(list(data), "cross_entropy"), training.optim_step(RATE)
    loss = weight = 0.0
    for one, row in zip(data, passed.result().loss_fn_outputs, strict=True):
        weights = one.loss_fn_inputs["weights"].to_numpy()
        loss -= float(weights @ row["logprobs"].to_numpy())
        weight += float(weights.sum())
    stepped.result()
    return Turn(loss / weight, sum(one.model_input.length for one in data))


def reinforced(
    training: tinker.TrainingClient,
    prompts: Sequence[types.ModelInput],
    params: types.SamplingParams,
    reward: Callable[[int, Sequence[int]], float],
) -> Turn:
    """Sample a group for each prompt from the latest weights, and take a step by advantages within the group.
    `reward` gets a prompt's number and the tokens of a sample."""
    sampling = training.save_weights_and_get_sampling_client().result()
    waiting = [sampling.sample(prompt, GROUP, params) for prompt in prompts]
    data, drawn, rewards = list[types.Datum](), list[types.SampledSequence](), list[float]()
    for number, future in enumerate(waiting):
        group = future.result().sequences
        found = [reward(number, one.tokens) for one in group]
        rewards += found
        for one, value in zip(group, found, strict=True):
            data.append(_rl_datum(prompts[number], one, value - float(np.mean(found))))
            drawn.append(one)
    passed, stepped = training.forward_backward(data, "importance_sampling"), training.optim_step(RATE)
    gaps = [
        np.abs(row["logprobs"].to_numpy()[-len(one.tokens) :] - np.asarray(one.logprobs))
        for row, one in zip(passed.result().loss_fn_outputs, drawn, strict=True)
    ]
    stepped.result()
    num_tokens = sum(one.model_input.length for one in data)
    return Turn(float(np.mean(rewards)), num_tokens, float(np.concatenate(gaps).mean()))


def _rl_datum(prompt: types.ModelInput, drawn: types.SampledSequence, advantage: float) -> types.Datum:
    before, logprobs = np.zeros(prompt.length - 1, np.float32), np.asarray(drawn.logprobs, np.float32)
    rows = {
        "target_tokens": np.concatenate([np.zeros(prompt.length - 1, np.int64), np.asarray(drawn.tokens)]),
        "logprobs": np.concatenate([before, logprobs]),
        "advantages": np.concatenate([before, np.full_like(logprobs, advantage)]),
    }
    chunks = [*prompt.chunks, types.EncodedTextChunk(tokens=drawn.tokens[:-1])] if drawn.tokens[1:] else prompt.chunks
    inputs = {name: types.TensorData.from_numpy(values) for name, values in rows.items()}
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


class Texts:
    """Prompts and data of the text model."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        found: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return found

    def datum(self, asked: str, answer: str) -> types.Datum:
        """Make a datum in which the answer alone has weight."""
        before, after = self.encode(asked), self.encode(answer)
        tokens = before + after
        weights = np.array([0] * (len(before) - 1) + [1] * len(after), np.float32)
        inputs = {"target_tokens": np.asarray(tokens[1:]), "weights": weights}
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
        )


class ShortAnswers:
    """Alice's: answers of few words, which end by themselves."""

    def __init__(self, training: tinker.TrainingClient, texts: Texts) -> None:
        self._training, self._texts = training, texts

    def turn(self, number: int) -> Turn:
        """Take a step on a few topics."""
        chosen = random.Random(number).sample(TOPICS, BATCH // GROUP * 2)
        prompts = [
            types.ModelInput.from_ints(self._texts.encode(f"Question: What is {one}?\nAnswer:")) for one in chosen
        ]
        params = types.SamplingParams(max_tokens=MAX_TOKENS, stop=["\n"], temperature=1.0)
        return reinforced(self._training, prompts, params, self._reward)

    def _reward(self, _: int, tokens: Sequence[int]) -> float:
        num_words = len(self._texts.decode(tokens).split())
        return float(0 < num_words <= MAX_WORDS and len(tokens) < MAX_TOKENS)


class Sums:
    """Bob's: sums of two digits."""

    def __init__(self, training: tinker.TrainingClient, texts: Texts) -> None:
        self._training, self._texts = training, texts

    def turn(self, number: int) -> Turn:
        """Take a step on a batch of sums."""
        digits = random.Random(number)
        pairs = [(digits.randrange(10), digits.randrange(10)) for _ in range(4 * BATCH)]
        data = [self._texts.datum(f"{left} + {right} =", f" {left + right}\n") for left, right in pairs]
        return supervised(self._training, data)


class Names:
    """Dan's: names of subjects in photographs."""

    def __init__(self, training: tinker.TrainingClient, conversation: Conversation, photos: list[Photo]) -> None:
        self._training, self._conversation, self._photos = training, conversation, photos

    def turn(self, number: int) -> Turn:
        """Take a step on a batch of photographs."""
        chosen = training_batch(self._photos, number, BATCH, seed=0)
        return supervised(self._training, [self._conversation.datum(one) for one in chosen])


class NamesByReward:
    """Carol's: the same names, learned from rewards once a few supervised steps have shown the form."""

    def __init__(self, training: tinker.TrainingClient, conversation: Conversation, photos: list[Photo]) -> None:
        self._training, self._conversation, self._photos = training, conversation, photos
        shown = Names(training, conversation, photos)
        for number in range(MOST_WARM_STEPS):
            if shown.turn(number).measured < WARM_LOSS:
                break

    def turn(self, number: int) -> Turn:
        """Take a step on a few photographs."""
        chosen = training_batch(self._photos, number, BATCH, seed=1)
        prompts = [self._conversation.prompt(one) for one in chosen]
        params = types.SamplingParams(max_tokens=12, stop=[self._conversation.end_token], temperature=1.0)

        def reward(place: int, tokens: Sequence[int]) -> float:
            return float(self._conversation.read_answer(list(tokens)) == chosen[place].label)

        return reinforced(self._training, prompts, params, reward)


@dataclass
class Run:
    """What was measured."""

    began: float = field(default_factory=time.monotonic)
    turns: defaultdict[str, list[tuple[float, Turn]]] = field(default_factory=lambda: defaultdict(list))
    """By owner, with the second at which each ended."""
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """MiB by process or GPU."""
    errors: dict[str, BaseException] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return time.monotonic() - self.began

    def read_memory(self, server: psutil.Process) -> None:
        """Read it once."""
        values, _ = of_processes(server)
        found = {part: mib for (part, measure), mib in values.items() if measure == "memory, MiB"}
        found |= {f"GPU {gpu.index}": gpu.used_bytes / MIB for gpu in all_gpus()}
        self.memory.append((self.seconds, found))

    def growing(self) -> dict[str, str]:
        """Return a line for each memory, and of those that grow the verdict."""
        settled = [row for row in self.memory if row[0] >= SETTLED * self.memory[-1][0]]
        times_s, found = [at_s for at_s, _ in settled], {}
        for part in sorted({name for _, values in settled for name in values}):
            line = slope(times_s, [values.get(part, 0.0) for _, values in settled])
            verdict = "GROWS" if line.grows(RESOLUTION_MIB) else "steady"
            found[part] = f"{line.mean:.0f} MiB, {line.per_hour:+.1f} +- {line.error_per_hour:.1f} an hour: {verdict}"
        return found


@contextmanager
def working(run: Run, works: Mapping[str, Callable[[], Work]]) -> Iterator[None]:
    """Have all owners work, each in a thread, while the block runs."""
    ends = threading.Event()

    def work(owner: str, begin: Callable[[], Work]) -> None:
        try:
            mine, number = begin(), 0
            while not ends.is_set():
                run.turns[owner].append((run.seconds, mine.turn(number)))
                number += 1
        except BaseException as error:  # noqa: BLE001 - raised at the end, by the owner's name
            run.errors[owner] = error

    threads = [threading.Thread(target=work, args=one, name=one[0]) for one in works.items()]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        ends.set()
        for one in threads:
            one.join(300)


def write(run: Run, out: Path) -> None:
    """Write both files."""
    with out.with_name(f"{out.name}-turns.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["owner", "second", "reward or loss", "tokens", "gap, nats"])
        for owner, turns in list(run.turns.items()):  # owners come while it writes
            writer.writerows([owner, round(at_s, 1), one.measured, one.num_tokens, one.gap] for at_s, one in turns)
    with out.with_name(f"{out.name}-memory.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        parts = sorted({name for _, values in run.memory for name in values})
        writer.writerow(["second", *parts])
        for at_s, values in run.memory:
            writer.writerow([round(at_s), *(round(values.get(part, 0.0), 1) for part in parts)])


def describe(run: Run) -> Iterator[str]:
    """Yield a line for each owner, and for each memory."""
    for owner, turns in run.turns.items():
        fifth = max(1, len(turns) // 5)
        parts = [turns[:fifth], turns[-fifth:]]
        (began, began_error), (ended, ended_error) = [_mean([one.measured for _, one in part]) for part in parts]
        gaps = [one.gap for _, one in turns if one.gap is not None]
        rate = sum(one.num_tokens for _, one in turns) / (turns[-1][0] - turns[0][0] or 1)
        of_gap = f", gap {np.mean(gaps):.4f} nats" if gaps else ""
        yield (
            f"{owner}: {len(turns)} steps, {began:.3f} +- {began_error:.3f} in the first fifth, {ended:.3f} +-"
            f" {ended_error:.3f} in the last, {rate:.0f} tokens/s{of_gap}"
        )
    for part, line in run.growing().items():
        yield f"{part}: {line}"


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(np.mean(values)), float(np.std(values) / len(values) ** 0.5)


def main() -> None:
    """Run, write, print and decide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="directory of the text model")
    parser.add_argument("out", type=Path, help="beginning of the files' names")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        keys_file = data_dir.with_name("keys")
        owners = {name: keys.add(keys_file, name) for name in ("alice", "bob", "carol", "dan")}
        models = {TEXT: given.text, TINY_VL: Path(DIRECTORIES[TINY_VL])}
        server = Server(data_dir, models, "--device", given.device, keys_file=keys_file).start()
        texts, photos = Texts(given.text), load_photos("train")
        conversation = Conversation(Path(DIRECTORIES[TINY_VL]))

        def training(owner: str, model: str) -> tinker.TrainingClient:
            service = tinker.ServiceClient(base_url=server.base_url, api_key=owners[owner])
            return service.create_lora_training_client(model, rank=RANK, seed=0).result()

        works: dict[str, Callable[[], Work]] = {
            "alice": lambda: ShortAnswers(training("alice", TEXT), texts),
            "bob": lambda: Sums(training("bob", TEXT), texts),
            "carol": lambda: NamesByReward(training("carol", TINY_VL), conversation, photos),
            "dan": lambda: Names(training("dan", TINY_VL), conversation, photos),
        }
        try:
            run.began = time.monotonic()
            with working(run, works):
                while run.seconds < 60 * given.minutes and not run.errors:
                    run.read_memory(psutil.Process(server.process.pid))
                    write(run, given.out)
                    time.sleep(SAMPLE_S)
        finally:
            server.stop()
            write(run, given.out)
    lines = list(describe(run))
    print("\n".join(lines))
    for owner, error in run.errors.items():
        print(f"{owner} met {type(error).__name__}: {error}")
    sys.exit(bool(run.errors) or any("GROWS" in line for line in lines))


if __name__ == "__main__":
    main()
