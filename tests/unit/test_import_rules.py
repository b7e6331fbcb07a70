"""Who may import whom: among the parts, and among the folders of each part."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SERVICE = ("kvrouter.v1", "kvrouter.core", "kvrouter.net", "kvrouter.runtime")
ALLOWED: dict[str, tuple[str, ...]] = {
    "v1": (),
    "core": ("kvrouter.v1",),
    # Below the SDK and the services.
    "net": ("kvrouter.v1", "kvrouter.core"),
    # Released apart, into engines with dependency pins of their own.
    "publisher": ("kvrouter.v1", "kvrouter.core", "kvrouter.net"),
    # Released apart, into programs that call a Frontend. It offers the router only where the services are installed.
    "client": ("kvrouter.v1", "kvrouter.router"),
    # All that is known of particular engines. It installs into one, as the SDK does.
    "engines": ("kvrouter.v1", "kvrouter.core", "kvrouter.net", "kvrouter.publisher"),
    # Options and static workers name engines and their keys.
    "runtime": (
        *("kvrouter.v1", "kvrouter.core", "kvrouter.net"),
        *("kvrouter.engines.fields", "kvrouter.engines.keys", "kvrouter.engines.openai_server"),
    ),
    "indexer": SERVICE,
    "scheduler": SERVICE,
    # Requests to engines, never their events.
    "frontend": (
        *SERVICE,
        *("kvrouter.engines.chats", "kvrouter.engines.fields", "kvrouter.engines.keys"),
        *("kvrouter.engines.media", "kvrouter.engines.openai_server", "kvrouter.engines.routes"),
    ),
    # A process beside an engine.
    "relay": (*SERVICE, "kvrouter.publisher", "kvrouter.engines"),
    # The same, and it serves the engine's requests.
    "sidecar": (*SERVICE, "kvrouter.publisher", "kvrouter.engines"),
    # An engine as the SDK sees one.
    "mocker": (*SERVICE, "kvrouter.publisher", "kvrouter.engines"),
    # Reads which policies there are, to name a run's mode. The conformance kit compares with the SDK's state.
    "devtools": (*SERVICE, "kvrouter.scheduler.policies.catalogue", "kvrouter.publisher"),
    # Puts the Scheduler's own code between engine models.
    "simulator": (
        *SERVICE,
        "kvrouter.scheduler",
        "kvrouter.mocker",
        "kvrouter.frontend.schedulers.sharding",
        "kvrouter.devtools.traces",
    ),
}
DEVELOPMENT = ("kvrouter.devcommands", "kvrouter.devtools", "kvrouter.mocker", "kvrouter.simulator")
"""Parts of the distribution kvrouter-devstack, which is not installed in production."""

COMPOSING = frozenset({"cli", "devcommands", "router"})
"""Parts whose job it is to put the others together."""

FOLDERS: dict[str, dict[str, tuple[str, ...]]] = {
    "net": {
        "backoff": (),
        "budgets": (),
        "logs": (),
        "model_files": (),
        "ticks": (),
        "trace_context": (),
        "wire_format": (),
        "decoding": ("logs",),
        "snapshot_format": ("wire_format",),
        "secret_files": ("logs",),
        "span_context": ("trace_context",),
        "tls": ("logs", "secret_files"),
        "etcd": ("backoff", "decoding", "logs", "secret_files", "tls"),
        "nats": ("budgets", "logs", "secret_files", "tls"),
        "local": ("etcd",),
        "http2": ("budgets", "logs", "ticks", "tls"),
        "calls": ("backoff", "budgets", "http2", "logs", "ticks", "tls", "wire_format"),
        "auth": ("calls", "http2", "logs", "secret_files", "tls"),
        "rpc": ("budgets", "calls", "http2", "logs", "tls", "trace_context"),
    },
    "runtime": {
        "version": (),
        "bounds": (),
        "deadline": (),
        "http_connections": (),
        "kv_transfer": (),
        "requests": (),
        "contracts": ("deadline",),
        "config": ("version",),
        "http_server": ("bounds", "http_connections"),
        "telemetry": ("bounds", "config", "http_connections", "http_server", "version"),
        "tracing": ("config", "version"),
        "rpc": ("deadline", "telemetry", "tracing"),
        "discovery": ("config", "contracts", "deadline", "rpc"),
        "overview": ("contracts", "deadline", "discovery", "rpc"),
        "process": ("config", "contracts", "discovery", "rpc", "telemetry", "tracing"),
    },
    "publisher": {
        "errors": (),
        "config": ("errors",),
        "events": ("errors",),
        "snapshots": ("config", "errors"),
        "publishing": ("errors", "events", "snapshots"),
        "serving": ("errors",),
        "worker_server": ("config", "errors", "publishing", "serving"),
        "registration": ("config", "errors", "publishing", "snapshots"),
        "worker": ("config", "errors", "publishing", "registration", "serving", "snapshots", "worker_server"),
    },
    "engines": {
        "chats": (),
        "fields": (),
        "keys": (),
        "openai_server": (),
        "routes": ("fields",),
        "events": ("fields",),
        # Follows the event sockets of an engine.
        "relay": ("events",),
        # Calls the HTTP API of an engine.
        "servers": ("events", "fields", "openai_server", "relay"),
    },
    "indexer": {
        "index": (),
        "ingest": ("index",),
        "resync": ("index",),
        "snapshots": ("index", "ingest"),
        "replica": ("index", "ingest", "resync", "snapshots"),
        "api": ("index", "replica", "snapshots"),
    },
    "scheduler": {
        "identifiers": (),
        "metrics": (),
        "policies": (),
        "request": ("policies",),
        "workers": ("policies",),
        "load": ("identifiers", "metrics", "policies", "request", "workers"),
        "overlap": ("bookings", "identifiers", "load", "policies", "request", "workers"),
        "bookings": ("identifiers", "load", "metrics", "request"),
        # The whole decision, from a request context to a booked response. The queue calls it, never the other way.
        "routing": ("bookings", "identifiers", "load", "metrics", "overlap", "policies", "request", "workers"),
        "queue": ("bookings", "identifiers", "load", "metrics", "overlap", "policies", "request", "routing"),
        "replication": ("bookings", "identifiers", "load", "metrics"),
        "api": (
            *("bookings", "identifiers", "load", "metrics", "policies"),
            *("queue", "replication", "request", "routing", "workers"),
        ),
        "settings": ("load", "overlap", "policies", "queue", "request"),
    },
    "frontend": {
        "access": ("generate_request", "settings"),
        "metrics": (),
        # The request as all of the folders below know it.
        "generate_request": (),
        "packed_prompt": ("generate_request",),
        "recording": (),
        "text": (),
        "schedulers": (),
        "workers": ("generate_request", "metrics", "packed_prompt"),
        "request": (
            *("access", "generate_request", "metrics", "packed_prompt", "recording"),
            *("schedulers", "settings", "text", "workers"),
        ),
        # The schema of requests, and responses. Nothing here calls an engine.
        "edge": ("access", "generate_request", "packed_prompt", "request", "text", "workers"),
        # Requests that engines with an OpenAI API answer.
        "proxy": (
            *("access", "edge", "generate_request", "metrics", "packed_prompt"),
            *("request", "schedulers", "text", "workers"),
        ),
        "web": ("metrics", "recording", "schedulers"),
        "service": ("access", "edge", "generate_request", "metrics", "packed_prompt", "proxy", "request", "schedulers"),
        "http_api": ("access", "edge", "generate_request", "proxy", "request", "service", "text", "web"),
        "processes": ("access", "app", "settings"),
        "settings": ("schedulers", "text"),
    },
    "relay": {
        "settings": (),
    },
    "sidecar": {
        "kubernetes": (),
        "engines_file": ("kubernetes",),
        "settings": ("engines_file", "kubernetes"),
        "engine_options": ("engines_file", "settings"),
        "served_engine": (),
        "supervisor": ("engine_options", "served_engine"),
        "metrics": ("supervisor",),
        "local_workers": (),
        "followed_engines": ("engine_options", "kubernetes", "metrics", "settings", "supervisor"),
    },
    "mocker": {
        "engine": (),
        "clock": (),
        "poison": ("engine",),
        "driver": ("clock", "engine", "poison"),
        "handover": ("rooms", "serving"),
        "logprobs": (),
        "constrained": (),
        "tools": (),
        "answers": ("constrained", "tools"),
        "tiers": ("engine",),
        "adapter": ("answers", "constrained", "driver", "engine", "handover", "logprobs", "tiers"),
        "metrics": ("driver",),
        "standalone": ("adapter", "app", "settings"),
        "fleet": ("app", "settings"),
        "serving": ("constrained", "driver", "engine"),
        "openai": ("constrained", "serving", "tools"),
        "rooms": ("serving",),
        "sglang": ("app", "constrained", "driver", "engine", "openai", "rooms", "serving", "settings"),
        "vllm": ("app", "driver", "engine", "openai", "serving", "settings", "tiers"),
        "settings": ("poison", "serving"),
    },
    "devtools": {
        # Checks a worker from outside.
        "conformance": (),
        "system": (),
        "traces": (),
        "replay": ("traces",),
    },
    "simulator": {
        "workloads": (),
        "engines": (),
        "routing": ("engines",),
        "results": ("engines",),
        "simulation": ("engines", "results", "routing", "workloads"),
        "floor": ("engines", "results", "workloads"),
        "plan": ("floor", "results", "simulation", "workloads"),
        "tuning": ("results", "simulation", "workloads"),
    },
}
"""Part → each of its folders and of the modules beside them → those of the same part that it may import."""

PUTS_TOGETHER = frozenset({"app", "__main__"})
"""Modules that put a part together: they import all of it."""


def sources(part: str) -> list[Path]:
    return sorted(ROOT.glob(f"*/src/kvrouter/{part}/**/*.py")) + sorted(
        ROOT.glob(f"services/*/src/kvrouter/{part}/**/*.py")
    )


def parts() -> list[str]:
    homes = [*ROOT.glob("*/src/kvrouter/*/*.py"), *ROOT.glob("services/*/src/kvrouter/*/*.py")]
    return sorted({module.parent.name for module in homes})


def kvrouter_imports(source: str, module: str) -> Iterator[str]:
    """Every kvrouter module that a source imports, wherever in the file, also relatively and by importlib."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "kvrouter")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [base])])
            if base.split(".")[0] == "kvrouter":
                yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant)
                and isinstance(argument.value, str)
                and argument.value.startswith("kvrouter")
            )


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def module_name(path: Path) -> str:
    relative = path.relative_to(next(parent for parent in path.parents if parent.name == "src"))
    return ".".join(relative.with_suffix("").parts)


def folder_of(module: str) -> str:
    """The folder of a part that a module is in, or the module's own name where it is in none."""
    return module.split(".")[2]


def test_only_commands_of_the_development_stack_import_it() -> None:
    # It imports the commands only where the stack is installed.
    chooses = "kvrouter.cli.extras"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("cli")
        for name in kvrouter_imports(path.read_text(), module_name(path))
        if within(name, DEVELOPMENT)
        if not (module_name(path) == chooses and within(name, ("kvrouter.devcommands.declarations",)))
    ]
    assert wrong == []


def test_every_part_has_a_rule() -> None:
    assert {"v1", "core", "net", "runtime", "publisher"} <= set(parts())
    assert set(parts()) <= set(ALLOWED) | COMPOSING


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_a_part_imports_only_what_it_may(part: str) -> None:
    allowed = (f"kvrouter.{part}", *ALLOWED[part])
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(part)
        if not path.stem.endswith("_pb2")
        for name in kvrouter_imports(path.read_text(), module_name(path))
        if not within(name, allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize("part", sorted(FOLDERS))
def test_a_folder_imports_only_what_it_may(part: str) -> None:
    wrong = []
    for path in sources(part):
        module = module_name(path)
        folder = folder_of(module)
        if folder in PUTS_TOGETHER or folder == "__init__":
            continue
        for name in kvrouter_imports(path.read_text(), module):
            if not within(name, (f"kvrouter.{part}",)) or name == f"kvrouter.{part}":
                continue
            if folder_of(name) not in (folder, *FOLDERS[part].get(folder, ())):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("part", sorted(FOLDERS))
def test_every_folder_has_a_rule(part: str) -> None:
    folders = {folder_of(module_name(path)) for path in sources(part) if len(module_name(path).split(".")) > 3}
    assert {folder for folder in folders if folder != "__init__"} <= set(FOLDERS[part])
    assert set(FOLDERS[part]) <= {folder_of(module_name(path)) for path in sources(part)}


@pytest.mark.parametrize("part", sorted(FOLDERS))
def test_folders_import_in_one_direction(part: str) -> None:
    TopologicalSorter(FOLDERS[part]).prepare()  # raises CycleError


_OF_ALL_POLICIES = ("kvrouter.scheduler.policies.interface", "kvrouter.scheduler.policies.loads")


def test_a_policy_imports_nothing_of_another() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("scheduler")
        if "policies" in path.parts and path.name != "catalogue.py"
        for name in kvrouter_imports(path.read_text(), module_name(path))
        if not within(name, ("kvrouter.core", "kvrouter.v1", *_OF_ALL_POLICIES))
    ]
    assert wrong == []


def test_the_engine_model_shares_no_hashing_with_the_router() -> None:
    """It is the ground truth that routing is judged by: a shared mistake in hashing must show."""
    files = [path for path in sources("mocker") if path.parent.name == "engine"]
    assert {"block_pool", "reference", "native"} <= {path.stem for path in files}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in kvrouter_imports(path.read_text(), module_name(path))
        if not within(name, ("kvrouter.mocker.engine",))
    ]
    assert wrong == []


def test_the_namespace_belongs_to_nobody() -> None:
    assert not [*ROOT.glob("*/src/kvrouter/__init__.py"), *ROOT.glob("services/*/src/kvrouter/__init__.py")]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import kvrouter.indexer.app", ["kvrouter.indexer.app"]),
        ("from kvrouter.indexer import app", ["kvrouter.indexer.app"]),
        ("from kvrouter import indexer", ["kvrouter.indexer"]),
        ("def f():\n    from ..indexer import app", ["kvrouter.indexer.app"]),
        ("importlib.import_module('kvrouter.indexer')", ["kvrouter.indexer"]),
        ("import json, kvrouterx", []),
    ],
)
def test_no_form_of_import_goes_unseen(source: str, found: list[str]) -> None:
    assert list(kvrouter_imports(source, "kvrouter.scheduler.app")) == found
