"""Parser of the command line: settings to serve with, commands for operators, and changes of the API keys."""

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any

import shtab
from pydantic import ValidationError

from backends.config import BackendConfig
from tinker_server.auth import keys
from tinker_server.embedded import DIRECTORIES, TINY_VL
from tinker_server.errors import StartFailed
from tinker_server.settings import Settings

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Exits with code 2 if it is invalid."""
    return _parser().parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tinker-server", description="A self-hosted server for the tinker SDK.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--data-dir", type=Path, help="database, checkpoints, scratch files (tinker-data)")
    common.add_argument("--keys-file", type=Path, help="file of the API keys (keys in the data directory)")
    database = argparse.ArgumentParser(add_help=False)
    database.add_argument("--database-url", help="SQLAlchemy URL (SQLite in the data directory)")
    models = argparse.ArgumentParser(add_help=False)
    models.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=SOURCE",
        help=f"serve a base model, a directory or a hub id, under a name; may be repeated; {TINY_VL} needs no source",
    )
    models.add_argument("--device", choices=["auto", "cpu", "cuda"], help="device to compute on (auto)")
    models.add_argument("--ranks", type=int, help="trainer processes per base model (1)")
    models.add_argument("--engines", type=int, help="vLLM engines per base model (1; on CUDA one for each of its GPUs)")
    models.add_argument("--tensor-parallel", type=int, help="GPUs that each engine is divided over (1)")
    models.add_argument("--base-copies", type=int, help="copies of a base on a GPU, for trainer and engine (2), or 1")
    models.add_argument(
        "--train-vision", action="store_true", default=None, help="models train the vision tower too (they do not)"
    )
    routing_help = "mixtures of experts train on samples with the sampler's choice of experts (the trainer's own)"
    models.add_argument("--replay-routing", action="store_true", default=None, help=routing_help)
    full_help = "train all weights instead of adapters, one model at a time on each base"
    models.add_argument("--full", action="store_true", default=None, help=full_help)
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", parents=[common, database, models], help="serve base models")
    serving.add_argument("--host", help="address to listen on (127.0.0.1); addresses beyond loopback need API keys")
    serving.add_argument("--port", type=int, help="port to listen on; 0 takes a free one (8000)")
    keys_help = "add, list and remove API keys; a running server reads the change"
    actions = commands.add_parser("keys", help=keys_help).add_subparsers(dest="action", required=True)
    adding = actions.add_parser("add", parents=[common], help="create a key and print it; it is shown only once")
    removing = actions.add_parser("remove", parents=[common], help="remove all keys of a name; its data stay")
    for action in (adding, removing):
        action.add_argument("name", help="owner of everything that is created with the key")
    actions.add_parser("list", parents=[common], help="list the names and the number of their keys")
    _add_operators(commands, common, [database, models])
    shtab.add_argument_to(parser, "--print-completion", help="print a completion script for a shell")
    return parser


def _add_operators(commands: Any, common: argparse.ArgumentParser, served: list[argparse.ArgumentParser]) -> None:
    """Add the commands for operators: status, doctor, backup, restore."""
    asking = commands.add_parser("status", help="show a running server's runs, queue and memory")
    asking.add_argument("--url", default="http://127.0.0.1:8000", help="its address (http://127.0.0.1:8000)")
    asking.add_argument("--key", default="tml-local", help="API key whose runs are shown (tml-local)")
    doctor_help = "report what this machine can serve; loads nothing"
    doctor = commands.add_parser("doctor", parents=[common, *served], help=doctor_help)
    doctor.add_argument("--gpu", help="plan for these GPUs, as H200:2, in place of this machine's")
    for name, text in (
        ("backup", "copy database and weights into a new directory, also while a server runs"),
        ("restore", "copy a backup into an empty data directory and database"),
    ):
        one = commands.add_parser(name, parents=[common, served[0]], help=text)
        one.add_argument("directory", type=Path, help="directory of the backup")


def change_keys(arguments: argparse.Namespace) -> None:
    """Run `tinker-server keys`. Raises StartFailed."""
    given = {name: value for name in ("data_dir", "keys_file") if (value := getattr(arguments, name)) is not None}
    path = Settings(**given).resolved_keys_file()
    try:
        match arguments.action:
            case "add":
                print(keys.add(path, arguments.name))
            case "remove":
                count = keys.remove(path, arguments.name)
                if count == 0:
                    raise StartFailed(f"{path} has no key of the name {arguments.name!r}")
                print(f"removed {count} of {arguments.name}")
            case "list":
                for name, count in Counter(keys.read(path).values()).items():
                    print(f"{name} {count}")
    except OSError as error:
        raise StartFailed(f"the keys file {path} cannot be written: {error.strerror}") from None


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Read the environment's settings and override them by the command line's. Raises StartFailed."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    try:
        settings = Settings()
        names = ("host", "port", "data_dir", "keys_file", "database_url")
        own = {name: given[name] for name in names if name in given}
        backend = settings.backend.model_dump(exclude_unset=True)
        switches = (
            "device",
            "ranks",
            "engines",
            "tensor_parallel",
            "base_copies",
            "train_vision",
            "replay_routing",
            "full",
        )
        backend |= {name: given[name] for name in switches if name in given}
        named = backend.get("models", {}) | dict(map(split_model, given.get("model", [])))
        backend["models"] = checked_models(named) if named or arguments.command == "serve" else {}
        return Settings(**own, backend=BackendConfig.model_validate(backend))
    except ValidationError as error:
        problem: Any = error.errors()[0]
        raise StartFailed(f"setting {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def split_model(text: str) -> tuple[str, str]:
    """Split `NAME=SOURCE`, or look up a model that comes with the server. Raises StartFailed."""
    if text in DIRECTORIES:
        return text, str(DIRECTORIES[text])
    name, separator, source = text.partition("=")
    if not (name and separator and source):
        raise StartFailed(f"--model {text}: write NAME=DIRECTORY or NAME=HUB_ID")
    return name, source


def checked_models(models: dict[str, str]) -> dict[str, str]:
    """Map each name to an absolute directory or hub id. Raises StartFailed if it is neither, or no model is given."""
    if not models:
        raise StartFailed(
            f"no models to serve: give --model NAME=DIRECTORY or NAME=HUB_ID, or --model {TINY_VL} for the small one"
            " that comes with the server"
        )
    checked = {}
    for name, source in models.items():
        directory = Path(source).expanduser()
        if directory.is_dir():
            checked[name] = str(directory.resolve())
        elif _HUB_ID.fullmatch(source) and not source.startswith("."):
            checked[name] = source
        else:
            raise StartFailed(f"model {name}: there is no directory {source}, and a hub id looks like org/name")
    return checked
