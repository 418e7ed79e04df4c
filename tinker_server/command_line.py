"""Parser of the command line: settings to serve with, commands for operators, and changes of the API keys."""

import argparse
import difflib
import math
import os
import re
import socket
import sys
from pathlib import Path
from typing import NoReturn, TypeAlias

import shtab
from pydantic import ValidationError

from tinker_server.auth import key_uses, keys
from tinker_server.auth.described import describe_keys
from tinker_server.auth.key import SCOPES
from tinker_server.backends.config import BackendConfig
from tinker_server.commands.tables import keys_table, show
from tinker_server.embedded import DIRECTORIES, TINY_VL
from tinker_server.errors import StartFailed
from tinker_server.release import release
from tinker_server.settings import Settings
from tinker_server.settings_sources import describe_error, from_environment, from_file, merge
from tinker_server.store.last_backup import FIRST_START

DAY_S, MAX_DAYS = 24 * 3600, 36_500
MIN_GIB = 0.001
_OPTIONS = {
    "max_context_length": "--max-context",
    "kv_cache_bytes": "--kv-cache",
    "gpu_memory_bytes": "--gpu-memory",
}
"""Options that are not named as their settings."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Exits with code 2 if it is invalid."""
    parser = _parser()
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse_unknown(_command_of(parser, arguments), unknown)
    return found


def _refuse_unknown(command: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    """Exit with code 2, with the usage of the command alone and the option that is meant."""
    known = [name for action in command._actions for name in action.option_strings]
    near = [difflib.get_close_matches(word.partition("=")[0], known, 1) for word in unknown if word.startswith("-")]
    meant = next((f"; did you mean {found[0]}?" for found in near if found), "")
    command.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")


def _command_of(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.ArgumentParser:
    """Return the parser of the command, and of its action, that the arguments name."""
    for word in arguments:
        for action in parser._actions:
            if isinstance(action.choices, dict) and word in action.choices:
                parser = action.choices[word]
                break
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tinker-server", description="A self-hosted server for the tinker SDK.")
    parser.add_argument("--version", action="version", version=f"tinker-server {release().label}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings; all others override it")
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
    models.add_argument("--ranks", type=int, help="trainer processes per base model (1; on CUDA all GPUs, shared out)")
    context_help = "trainer processes that compute each packed microbatch together, a slice of its tokens each (1)"
    models.add_argument("--context-parallel", type=int, metavar="N", help=context_help)
    models.add_argument("--engines", type=int, help="vLLM engines per base model (1; on CUDA one per GPU with room)")
    parallel_help = "GPUs that each engine is divided over (1; on CUDA as many as it needs)"
    models.add_argument("--tensor-parallel", type=int, help=parallel_help)
    models.add_argument("--trainer-gpus", type=_numbers, metavar="N,N", help="GPUs that trainers may use (any)")
    models.add_argument("--sampler-gpus", type=_numbers, metavar="N,N", help="GPUs that engines may use (any)")
    models.add_argument(
        "--base-copies",
        type=int,
        help="copies of a base on a GPU: 1, for trainer and engine (default where it can be), or 2",
    )
    precision_help = "keep bases in fp8, made at load where files are not quantised, or experts in their files' mxfp4"
    models.add_argument("--base-precision", choices=["fp8", "mxfp4"], help=precision_help)
    _add_sizes(models)
    models.add_argument(
        "--train-vision", action="store_true", default=None, help="models train the vision tower too (off)"
    )
    routing_help = "mixtures of experts train on samples with the sampler's choice of experts (the trainer's own)"
    models.add_argument("--replay-routing", action="store_true", default=None, help=routing_help)
    cluster_help = "let other machines join, which sample and train too (off)"
    models.add_argument("--cluster", action="store_true", default=None, help=cluster_help)
    commands = parser.add_subparsers(dest="command", required=True)
    settings_help = (
        "Other settings: a TOML file (--config), or variables TINKER_SERVER_NAME. docs/settings.md has them all."
    )
    serving = commands.add_parser(
        "serve", parents=[common, database, models], help="serve base models", epilog=settings_help
    )
    serving.add_argument("--host", help="address to listen on (127.0.0.1); addresses beyond loopback need API keys")
    serving.add_argument("--port", type=int, help="port to listen on; 0 takes a free one (8000)")
    serving.add_argument("--cluster-address", help="address by which other machines reach this one (its own)")
    port_help = "port at which other machines join; Ray takes the two behind it (8100)"
    serving.add_argument("--cluster-port", type=int, help=port_help)
    _add_joining(commands)
    keys_help = "add, list and remove API keys; a running server reads the change"
    actions = commands.add_parser("keys", help=keys_help).add_subparsers(dest="action", required=True)
    adding = actions.add_parser("add", parents=[common], help="create a key and print it; it is shown only once")
    removing = actions.add_parser("remove", parents=[common], help="remove all keys of a name; its data stay")
    for action in (adding, removing):
        action.add_argument("name", help="owner of everything that is created with the key")
    scope_help = "what the key is for: all, sample (sampling and chats alone) or metrics (/metrics alone) (all)"
    adding.add_argument("--scope", choices=SCOPES, default="all", help=scope_help)
    adding.add_argument("--admin", action="store_true", help="it may also see and stop the work of all owners")
    adding.add_argument("--expires-days", type=_days, metavar="DAYS", help="days until the key expires (never)")
    removing.add_argument("--key", metavar="ID", help="remove the key of this id alone, as `list` shows it")
    _add_json(actions.add_parser("list", parents=[common], help="list the keys: name, id, scope, dates, last use"))
    _add_operators(commands, common, [database, models])
    shtab.add_argument_to(parser, "--print-completion", help="print a completion script for a shell")
    return parser


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What a parser's commands are added to."""


def _add_operators(commands: Commands, common: argparse.ArgumentParser, served: list[argparse.ArgumentParser]) -> None:
    """Add the commands for operators: status, admin, doctor, verify, backup, restore."""
    remote = argparse.ArgumentParser(add_help=False)
    url, key = (os.environ.get(name) for name in ("TINKER_BASE_URL", "TINKER_API_KEY"))  # the SDK's own
    here = "http://127.0.0.1:8000"
    remote.add_argument("--url", default=url or here, help=f"the server's address ($TINKER_BASE_URL, or {here})")
    remote.add_argument("--key", default=key or "tml-local", help="API key to ask with ($TINKER_API_KEY)")
    status_help = "show a running server's queue and memory, and the runs of the key's owner"
    asking = commands.add_parser("status", parents=[remote], help=status_help)
    _add_json(asking)
    _add_administration(commands, remote)
    doctor_help = "report what this machine can serve; loads nothing"
    doctor = commands.add_parser("doctor", parents=[common, *served], help=doctor_help)
    doctor.add_argument("--gpu", help="plan for these GPUs, as H200:2, in place of this machine's")
    changes_help = "list all changes inside vLLM, transformers and torch, those that fit too"
    doctor.add_argument("--changes", action="store_true", help=changes_help)
    _add_json(doctor)
    verifying = commands.add_parser("verify", parents=[common], help="check the signature of a run's proof sheet")
    verifying.add_argument("file", type=Path, help="the signed JSON from the run's page")
    for name, text in (
        ("backup", "copy database and weights into a new directory, also while a server runs"),
        ("restore", "copy a backup into an empty data directory and database"),
    ):
        command = commands.add_parser(name, parents=[common, served[0]], help=text)
        command.add_argument("directory", type=Path, help="directory of the backup")


def _add_json(*commands: argparse.ArgumentParser) -> None:
    for command in commands:
        command.add_argument("--json", action="store_true", help="print one JSON object in place of tables")


def _add_joining(commands: Commands) -> None:
    """Add the commands of a machine that joins another's cluster: join and leave."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("address", metavar="HOST:PORT", help="the cluster's address, as `serve --cluster` logs it")
    token_help = "copy of the serving machine's token file, which only its user may read"
    common.add_argument("--token-file", type=Path, required=True, metavar="FILE", help=token_help)
    here = socket.gethostname()
    common.add_argument("--name", default=here, help=f"name of the machine in the cluster ({here})")
    join_help = "join a server on another machine and lend it this one's GPUs (Ctrl-C or `leave` ends it)"
    joining = commands.add_parser("join", parents=[common], help=join_help)
    model_help = "a model of the server, with its directory or hub id here, else fetched from there; may be repeated"
    joining.add_argument("--model", action="append", required=True, metavar="NAME[=SOURCE]", help=model_help)
    data_help = "directory for fetched models, weights in use, compiled kernels and the engines' log (tinker-node)"
    joining.add_argument("--data-dir", type=Path, default=Path("tinker-node"), help=data_help)
    commands.add_parser("leave", parents=[common], help="remove this machine from the cluster")


def _add_administration(commands: Commands, remote: argparse.ArgumentParser) -> None:
    """Add the command for administrators, whose key must have that role."""
    admin_help = "all owners of a running server, with an administrator's key"
    actions = commands.add_parser("admin", help=admin_help).add_subparsers(dest="action", required=True)
    owners = actions.add_parser(
        "owners", parents=[remote], help="list owners with their memory, disk, queue and tokens"
    )
    owners.add_argument("--hours", type=int, default=24, help="hours for which tokens are counted (24)")
    runs = actions.add_parser("runs", parents=[remote], help="list the newest runs of all owners")
    runs.add_argument("--owner", help="only the runs of this owner (all)")
    _add_json(owners, runs)
    unload_help = "move a run's model to disk; its next operation brings it back"
    stop_help = "end the session of a run for good: what was not saved is lost"
    unloading = actions.add_parser("unload", parents=[remote], help=unload_help)
    stopping = actions.add_parser("stop", parents=[remote], help=stop_help)
    for action in (unloading, stopping):
        action.add_argument("run", help="id of the run")
    stopping.add_argument("--reason", default="", help="reason, which the owner's client shows")


def _add_sizes(models: argparse.ArgumentParser) -> None:
    """Add the options from which memory is planned."""
    context_help = "longest sequence in tokens (the model's own, at most 32768, 8192 on CPU)"
    models.add_argument(option_of("max_context_length"), dest="max_context_length", type=int, help=context_help)
    models.add_argument("--max-lora-rank", type=int, help="largest LoRA rank (128, or what fits)")
    models.add_argument("--models-at-once", type=int, help="LoRA models that train at the same time (what fits, to 8)")
    cache_help = "KV cache of each engine in GiB (what is left over)"
    cache = option_of("kv_cache_bytes")
    models.add_argument(cache, dest="kv_cache_bytes", type=_gib, metavar="GIB", help=cache_help)
    memory, memory_help = option_of("gpu_memory_bytes"), "memory of each GPU to take in all, in GiB (all of it)"
    models.add_argument(memory, dest="gpu_memory_bytes", type=_gib, metavar="GIB", help=memory_help)


def option_of(name: str) -> str:
    """Return the option for the setting with this name, without its table."""
    return _OPTIONS.get(name, f"--{name.replace('_', '-')}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _gib(text: str) -> int:
    """Return a size in bytes. Raises ValueError."""
    gib = float(text)
    if not MIN_GIB <= gib < math.inf:
        raise ValueError(text)
    return int(gib * 2**30)


def _days(text: str) -> float:
    """Return a positive number of days. Raises ValueError."""
    days = float(text)
    if not 0 < days <= MAX_DAYS:
        raise ValueError(text)
    return days


# argparse shows these in its errors
_numbers.__name__, _gib.__name__ = "list of numbers", f"number of GiB, at least {MIN_GIB}"
_days.__name__ = f"number of days, more than 0 and at most {MAX_DAYS}"


def change_keys(arguments: argparse.Namespace, settings: Settings) -> None:
    """Run `tinker-server keys` on the keys file. Raises StartFailed."""
    path = settings.resolve_keys_file()
    try:
        match arguments.action:
            case "add":
                valid_s = None if arguments.expires_days is None else arguments.expires_days * DAY_S
                is_admin, scope = arguments.admin, arguments.scope
                is_read = path.exists() or (path.parent / FIRST_START).exists()
                print(keys.add(path, arguments.name, scope=scope, is_admin=is_admin, valid_s=valid_s))
                if not is_read:
                    use = "a server reads it only with the same --data-dir, --keys-file or --config"
                    print(f"made {path.resolve()}: {use}", file=sys.stderr)
            case "remove":
                count = keys.remove(path, arguments.name, arguments.key)
                if count == 0:
                    which = "" if arguments.key is None else f" with the id {arguments.key}"
                    raise StartFailed(f"{path} has no key of the name {arguments.name!r}{which}")
                print(f"removed {count} of {arguments.name}")
            case _:
                found, used_at = list(keys.read(path).values()), key_uses.read(settings.data_dir)
                if arguments.json:
                    print(describe_keys(found, used_at).model_dump_json())
                elif found:
                    show(keys_table(found, used_at))
                else:  # no line on the output, which scripts read
                    print(f"no API keys in {path.resolve()}: `{keys.adding(path)}` makes one", file=sys.stderr)
    except BrokenPipeError:  # the output's
        raise
    except OSError as error:
        raise StartFailed(f"the keys file {path} cannot be written: {error.strerror}") from None


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Read the settings of file, environment and command line, each overriding the one before. Raises StartFailed."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    in_file = from_file(given["config"]) if "config" in given else {}
    settings = merge(in_file, from_environment())
    settings |= {name: given[name] for name in Settings.model_fields if name in given}
    backend = settings.pop("backend", {})
    backend |= {name: given[name] for name in BackendConfig.model_fields if name in given}
    of_file = backend.get("models", {})
    is_read = isinstance(of_file, dict) and all(isinstance(source, str) for source in of_file.values())
    if "model" in given and is_read:  # the command serves models, or plans for them; other values are refused below
        named = of_file | dict(map(split_model, given["model"]))
        if not named and arguments.command == "serve":
            raise StartFailed(
                f"no models to serve: give --model NAME=DIRECTORY or NAME=HUB_ID, or --model {TINY_VL} for the small"
                " one that comes with the server"
            )
        backend["models"] = resolve_models(named)

    def name_source(name: str) -> str:
        """Return the option that set it, or the name in the settings file; the environment has been checked."""
        last = name.rpartition(".")[2]
        return option_of(last) if last in given else f"{given['config']}: {name}"

    try:
        return Settings(**settings, backend=backend)
    except ValidationError as error:
        raise StartFailed(describe_error(error, name_source)) from None


def split_model(text: str) -> tuple[str, str]:
    """Split `NAME=SOURCE`, or look up a model that comes with the server. Raises StartFailed."""
    if text in DIRECTORIES:
        return text, str(DIRECTORIES[text])
    name, separator, source = text.partition("=")
    if not (name and separator and source):
        raise StartFailed(f"--model {text}: write NAME=DIRECTORY or NAME=HUB_ID")
    return name, source


def resolve_models(models: dict[str, str]) -> dict[str, str]:
    """Map each name to an absolute directory or hub id. Raises StartFailed if it is neither."""
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
