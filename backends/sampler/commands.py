"""Commands to a sampler process, which matches them by type."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tinker_server.api_schemas.sampling import SampleResponse
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.rpc import Command
from tinker_server.backends.protocol import ChatTask, ChatUsage, EngineUse, SamplingTask


@dataclass(frozen=True)
class Start(Command[None]):
    """Load the model. Always the first command."""

    spec: ModelSpec


@dataclass(frozen=True)
class Sample(Command[SampleResponse]):
    """Do the task, and answer when all its samples are done."""

    task: SamplingTask


@dataclass(frozen=True)
class Chat(Command[ChatUsage]):
    """`protocol.Sampler.chat`; the answer itself comes first, in parts."""

    task: ChatTask


@dataclass(frozen=True)
class Publish(Command[None]):
    """`protocol.Sampler.publish`."""

    weights: Path
    only_reads: bool = False
    """Read them into a slot, and compute nothing with them: to publish them then takes little."""


@dataclass(frozen=True)
class Receive(Command[None]):
    """Write down weights for later commands: the server has them in this directory, on another machine."""

    weights: Path
    files: Mapping[str, pickle.PickleBuffer]


@dataclass(frozen=True)
class CountProgress(Command[int]):
    """Return a number that grows with every step of the engine and every task done."""


@dataclass(frozen=True)
class CountSequences(Command[EngineUse]):
    """Return the engine's load."""


@dataclass(frozen=True)
class ShareRunning(Command[dict[str, int]]):
    """Note how many sequences each owner has running in the pool's other engines; return how many in this one."""

    elsewhere: dict[str, int]


def weights_of(command: Command[Any]) -> Path | None:
    """Return the directory of the weights that a command is about; None for the base model, or for none."""
    match command:
        case Sample(task):
            return task.weights
        case Chat(chat):
            return chat.weights
        case Publish(weights):
            return weights
        case _:
            return None


GrammarKind = Literal["json", "regex", "grammar", "structural_tag"]


@dataclass(frozen=True)
class StartGrammars(Command[None]):
    """Read a tokenizer in xgrammar's form. Always the first command of a process that tries grammars."""

    tokenizer: str
    limit_s: float
    """CPU seconds for each grammar."""


@dataclass(frozen=True)
class TryGrammar(Command[None]):
    """Compile a grammar. The process ends if that takes too long."""

    kind: GrammarKind
    text: str
