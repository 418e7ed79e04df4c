"""Imports run one way, api_schemas <- backends <- tinker_server, and some libraries stay in one room."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path.relative_to(ROOT)
    for package in ("api_schemas", "backends", "migrations", "tinker_server")
    for path in sorted((ROOT / package).rglob("*.py"))
]
SEEN_OF_BACKENDS = (
    "backends.protocol",
    "backends.cluster.join",
    "backends.config",
    "backends.configure.create",
    "backends.configure.torchvision_check",
    "backends.files",
    "backends.lru",
    "backends.tasks",
    "backends.processes.spans",
    "backends.processes.crash_isolation",
    "backends.processes.fair_queue",
    "backends.processes.fair_threads",
    "backends.processes.preloaded",
)


_WITHIN_ONE_NAME = re.compile(r"^tinker_server\.(?=(api_schemas|backends|migrations)\b)")
"""They are imported within tinker_server, where links to their folders stand. Here they are named by their folders."""


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Every dotted name that a file imports, lazy and type-checking imports included."""
    names: list[str] = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return tuple(_WITHIN_ONE_NAME.sub("", name) for name in names)


def importers(*modules: str) -> dict[str, set[str]]:
    """Files that import one of the modules or something inside it, with what they import."""
    found = {str(path): {name for name in imported_names(path) if within(name, *modules)} for path in FILES}
    return {path: names for path, names in found.items() if names}


def within(name: str, *modules: str) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def test_api_schemas_import_neither_backends_nor_the_server() -> None:
    assert not [path for path in importers("backends", "tinker_server") if path.startswith("api_schemas/")]


def test_backends_do_not_import_the_server() -> None:
    assert not [path for path in importers("tinker_server") if path.startswith("backends/")]


def test_the_server_sees_only_the_public_side_of_backends() -> None:
    for path, names in importers("backends").items():
        if path.startswith("tinker_server/"):
            assert all(within(name, *SEEN_OF_BACKENDS) for name in names), (path, names)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Deferred imports count: a circle that a function hides is one."""
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    imports = {
        module: {name for name in _closest(imported_names(path), modules) if name != module}
        for module, path in modules.items()
    }
    assert _circle(imports) is None


def _closest(names: Iterable[str], modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules that imported names are in or are."""
    for name in names:
        if name in modules:
            yield name
        elif (parent := name.rpartition(".")[0]) in modules:
            yield parent


def _circle(imports: Mapping[str, Iterable[str]]) -> list[str] | None:
    """One circle of modules, the first again at the end; None where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_a_circle_of_imports_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None


def test_torch_stays_in_backends() -> None:
    assert all(path.startswith("backends/") for path in importers("torch"))


def test_vllm_and_what_runs_beside_it_stay_in_one_folder_and_in_the_families_engine_parts() -> None:
    """`doctor` alone reads something of the folder, the list of changes, which imports no vllm."""
    folder, changes = "backends/sampler/engine/", "backends.sampler.engine.vllm_patches.targets"
    beside = [
        path for path in map(str, FILES) if path.startswith(folder) or re.search(r"families/(\w+/)?engine\.py", path)
    ]
    assert set(importers("vllm")) <= set(beside)
    users = importers(*(path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in beside))
    assert {path: users[path] for path in users.keys() - set(beside)} == {"backends/configure/examine.py": {changes}}
    assert changes.replace(".", "/") + ".py" not in importers("vllm")


def test_ray_stays_in_the_process_that_runs_its_head() -> None:
    assert set(importers("ray")) == {"backends/cluster/head.py", "backends/cluster/nodes.py"}
    assert not importers("backends.cluster.head")
    assert set(importers("backends.cluster.nodes")) == {"backends/cluster/head.py"}


@pytest.mark.heavy
def test_the_servers_own_process_imports_no_ray() -> None:
    code = "import sys, tinker_server.__main__, tinker_server.backends.configure.create; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_only_the_launcher_starts_processes_and_one_module_counts_each_kind_of_memory() -> None:
    for pattern, room in (
        (r"create_subprocess|subprocess\.|killpg", "backends/processes/guarded.py"),
        (r"exec[lv]|posix_spawn", "backends/processes/forking.py"),
        (r"= \"CUDA_VISIBLE_DEVICES\"", "backends/processes/launcher.py"),
        (r"psutil", "backends/processes/heap.py"),
        (r"device_count|get_device_properties|mem_get_info", "backends/configure/placement.py"),
    ):
        backends = [path for path in FILES if path.parts[0] == "backends"]
        assert [str(path) for path in backends if re.search(pattern, (ROOT / path).read_text())] == [room]


def test_only_families_know_a_kind_of_model_by_name() -> None:
    names = re.compile(r"qwen|pixel_values|grid_thw|mrope|deepstack|image_token_id|video_token_id", re.IGNORECASE)
    others = [path for path in FILES if path.parts[0] == "backends" and path.parts[1] != "families"]
    knowing = [str(path) for path in others if names.search((ROOT / path).read_text())]
    assert knowing == []


NAMING_A_KIND = {
    "deepseek_v3": ("deepseek", 5),
    "gemma": ("gemma", 12),
    "gpt_oss": ("gpt.?oss", 11),
    "internvl": ("internvl", 2),
    "nemotron_h": ("nemotron", 5),
    "qwen": ("qwen", 6),
    "smolvlm": ("smolvlm", 2),
}
"""A kind of model's name in text, and the number of files outside its own that have it, which may only fall."""


@pytest.mark.parametrize("kind", NAMING_A_KIND)
def test_no_further_file_knows_a_kind_of_model_by_name(kind: str) -> None:
    name, count = NAMING_A_KIND[kind]
    own = {Path(f"backends/families/{kind}"), Path(f"backends/families/{kind}.py")}
    others = [path for path in FILES if not own & {path, path.parent}]
    assert any(path in own or path.parent in own for path in FILES)
    found = [str(path) for path in others if re.search(name, (ROOT / path).read_text(), re.IGNORECASE)]
    assert len(found) == count, found


WINGS: dict[str, tuple[tuple[str, ...], int]] = {
    "chat": (("tinker_server.chat", "tinker_server.routes.chat", "backends.sampler.engine.chat"), 3),
    "client metrics, steps and notes": (
        (
            "tinker_server.store.client_metrics",
            "tinker_server.store.steps",
            "tinker_server.store.notes",
            "tinker_server.routes.metrics_collect",
        ),
        14,
    ),
    "cluster": (("backends.cluster",), 2),
    "context slices": (("backends.trainer.model.context",), 2),
    "dashboard": (("tinker_server.dashboard",), 1),
    "fp8": (
        (
            "backends.kernels.fp8",
            "backends.kernels.packed_experts",
            "backends.configure.fp8_parts",
            "backends.formats.block_fp8",
            "backends.formats.divided_fp8",
            "backends.trainer.lora.packed_fp8",
            "backends.sampler.engine.vllm_patches.packed_experts",
        ),
        10,
    ),
    "images by address": (("tinker_server.image_addresses", "tinker_server.image_hosts"), 4),
    "linear attention and Mamba2": (
        (
            "backends.families.linear_attention",
            "backends.families.nemotron_h",
            "backends.kernels.delta_rule",
            "backends.kernels.delta_rule_gradients",
            "backends.trainer.model.linear_attention",
            "backends.trainer.model.state_space",
        ),
        11,
    ),
    "memory plan": (
        (
            "backends.configure.memory_plan",
            "backends.configure.placement",
            "backends.configure.nearest_fit",
            "backends.configure.fitting_cards",
        ),
        2,
    ),
    "one copy of the base": (("backends.base_weights",), 4),
    "owners' records": (
        (
            "tinker_server.store.audit",
            "tinker_server.store.usage",
            "tinker_server.routes.admin",
            "tinker_server.routes.owners",
        ),
        5,
    ),
    "recent samples": (
        (
            "tinker_server.observability.batch_records",
            "tinker_server.observability.datum_gradients",
            "tinker_server.observability.datum_prompts",
            "tinker_server.observability.gallery",
            "tinker_server.observability.kept_datums",
            "tinker_server.observability.recent_samples",
            "tinker_server.observability.sample_files",
            "tinker_server.observability.thinned_steps",
            "tinker_server.observability.weight_steps",
        ),
        5,
    ),
    "recovery": (
        (
            "tinker_server.store.lease",
            "tinker_server.store.futures.replay_log",
            "tinker_server.models.replay",
            "tinker_server.models.crash_isolation",
            "backends.processes.crash_isolation",
        ),
        10,
    ),
    "router replay": (
        (
            "backends.formats.expert_routing",
            "backends.trainer.model.router_replay",
            "backends.trainer.model.routing",
            "backends.sampler.engine.vllm_patches.routed_experts",
        ),
        6,
    ),
    "tracing": (("tinker_server.observability.tracing",), 1),
    "uploads and exports": (
        (
            "tinker_server.weights.archives",
            "tinker_server.weights.export",
            "tinker_server.weights.uploads",
            "tinker_server.store.uploads",
        ),
        6,
    ),
}
"""The modules of each feature beside the straight line, and the number of files outside that import them, which may
only fall."""


@pytest.mark.parametrize("wing", WINGS)
def test_no_further_file_imports_a_wing(wing: str) -> None:
    modules, count = WINGS[wing]
    paths = [module.replace(".", "/") for module in modules]
    assert all((ROOT / path).is_dir() or (ROOT / f"{path}.py").is_file() for path in paths)
    found = sorted(path for path in importers(*modules) if not path.startswith(tuple(f"{own}/" for own in paths)))
    found = [path for path in found if path.removesuffix(".py") not in paths]
    assert len(found) == count, found


def test_opentelemetry_stays_in_its_room() -> None:
    assert all(path.startswith("tinker_server/observability/tracing/") for path in importers("opentelemetry"))


def test_routes_do_not_import_sqlalchemy() -> None:
    assert not [path for path in importers("sqlalchemy") if path.startswith("tinker_server/routes/")]


def test_the_store_does_not_import_fastapi() -> None:
    assert not [path for path in importers("fastapi") if path.startswith("tinker_server/store/")]


def test_only_the_app_imports_the_dashboard() -> None:
    others = {path for path in importers("tinker_server.dashboard") if not path.startswith("tinker_server/dashboard/")}
    assert others == {"tinker_server/app.py"}


def test_the_dashboard_asks_the_stores_and_writes_no_sql() -> None:
    assert not [path for path in importers("sqlalchemy") if path.startswith("tinker_server/dashboard/")]


def test_only_main_imports_the_app() -> None:
    assert set(importers("tinker_server.app")) <= {"tinker_server/__main__.py"}


def test_event_loops_start_only_in_process_mains() -> None:
    callers = {
        str(path)
        for path in FILES
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.run"
    } | set(importers("asyncio.run"))
    assert callers <= {"tinker_server/__main__.py", "backends/sampler/engine/process.py", "backends/cluster/head.py"}


def test_no_test_file_imports_another() -> None:
    """Shared parts are in modules that hold no tests."""
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("*.py"))]
    modules = {path: ".".join(path.with_suffix("").parts) for path in files}
    tests = [module for path, module in modules.items() if path.name.startswith(("test_", "conftest"))]
    for path in files:
        assert not [name for name in imported_names(path) if within(name, *tests)], path


def test_no_folder_is_a_package_of_its_own_name() -> None:
    """In a checkout, a module that is imported by two names would be two modules. A wheel has the long name alone."""
    short = re.compile(
        r"^\s*(?:from|import) (?:api_schemas|backends|migrations)\b|[\"'](?:api_schemas|backends)\.[a-z]", re.MULTILINE
    )
    folders = [path for room in ("benchmarks", "examples", "tests") for path in sorted((ROOT / room).rglob("*.py"))]
    named = [path for path in [*(ROOT / path for path in FILES), *folders] if short.search(path.read_text())]
    assert named == [Path(__file__)]
