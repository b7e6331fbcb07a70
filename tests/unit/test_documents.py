"""What the documents name is there: files and headings that they link to, and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from kvrouter.cli.main import app
from kvrouter.devtools.conformance.options import parser as check_parser
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.mocker.settings import MockerSettings
from kvrouter.relay.settings import RelaySettings
from kvrouter.runtime.config.sources import _SUCCESSORS, _parser
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.sidecar.settings import LocalEnginesSettings, SidecarSettings

ROOT = Path(__file__).parents[2]
PARTS = (
    "bench",
    "cli",
    "core",
    "deploy",
    "devtools",
    "docs",
    "examples",
    "net",
    "protos",
    "services",
    "simulator",
    "tests",
)
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(path for part in PARTS for path in (ROOT / part).rglob("*.md"))})
FOREIGN = frozenset(
    {
        *("--find-links", "--http2-prior-knowledge", "--list-methods", "--now", "--protocol"),
        *("--data-parallel-rank", "--data-parallel-size"),
        *(
            "--disaggregation-mode",
            "--enable-metrics",
            "--kv-transfer-config",
            "--kv-events-config",
            "--model-path",
            "--page-size",
            "--schedule-low-priority-values-first",
        ),
        *("--enable-cache-report", "--enable-force-include-usage", "--enable-prompt-tokens-details"),
        "--stream-response-default-include-usage",
        *("--example", "--no-default-features", "--release"),
        *("--build-arg", "--cacert", "--cap-drop", "--read-only", "--security-opt", "--tmpfs"),
        *("--force-reinstall", "--no-deps"),
    }
)
"""Options of other programs in commands that documents show."""
REMOVED = frozenset(f"--{name}" for name in _SUCCESSORS)
"""Options of earlier releases, which documents say how to replace."""


def anchors(document: Path) -> set[str]:
    """The names by which its headings can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        linked = document.parent / name if name else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.fixture(scope="module")
def sources() -> set[str]:
    """The paths of all Python and Rust sources and of their folders, each after a slash; a folder ends with one."""
    files = {
        path.relative_to(ROOT)
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.suffix in (".py", ".rs") and not {".venv", "target"} & set(path.parts)
    }
    folders = {folder for file in files for folder in file.parents}
    return {f"/{file}" for file in files} | {f"/{folder}/" for folder in folders}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_there(document: Path, sources: set[str]) -> None:
    """A name in a README without a folder is that of a file below; in the row of a folder, below that one."""
    is_readme = document.name == "README.md" and document.parent != ROOT
    top = f"/{document.parent.relative_to(ROOT)}" if is_readme else ""
    below = [each.removeprefix(top) for each in sources if each.startswith(f"{top}/")]
    for line in document.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| `([\w/]+/)` \|", line) if is_readme else None
        folder = f"/{row[1]}" if row else "/"
        inside = [each for each in below if folder in each]
        assert inside or not row, folder
        for name in re.findall(r"`([\w./]+\.(?:py|rs))`", line):
            assert any(each.endswith(f"/{name}") for each in (sources if "/" in name else inside)), name


@pytest.fixture(scope="module")
def tests() -> set[str]:
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in (
            path.stem,
            *re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE),
        )
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_are_there(document: Path, tests: set[str]) -> None:
    for name, cut in re.findall(r"\b(test_\w+)(…?)", document.read_text(encoding="utf-8")):
        assert any(each.startswith(name) if cut else each == name for each in tests), name


def options_of(command: object) -> Iterator[frozenset[str]]:
    """The names of each option of a command and those below it."""
    for parameter in getattr(command, "params", ()):
        yield frozenset(name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--"))
    for each in getattr(command, "commands", {}).values():
        yield from options_of(each)


SERVICES = (
    *(IndexerSettings, SchedulerSettings, FrontendSettings),
    *(RelaySettings, SidecarSettings, LocalEnginesSettings, MockerSettings),
)
COMMANDS = [names for names in options_of(typer.main.get_command(app)) if names]


def options_in(document: Path) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", document.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Every option of every service, command and benchmark."""
    return {
        *(name for names in COMMANDS for name in names),
        *(option for kind in SERVICES for option in _parser((kind,), None)._option_string_actions),
        *check_parser()._option_string_actions,
        *(
            option
            for path in (ROOT / "bench").rglob("*.py")
            for option in re.findall(r'"(--[a-z][a-z0-9-]*)"', path.read_text(encoding="utf-8"))
        ),
        *FOREIGN,
        *REMOVED,
        "--help",
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_are_there(document: Path, options: set[str]) -> None:
    named = options_in(document)
    assert named <= options, sorted(named - options)


def test_every_option_is_in_some_document() -> None:
    named = {option for document in DOCUMENTS for option in options_in(document)}
    fields = {field.replace("_", "-") for kind in SERVICES for field in kind.model_fields}
    every = [*COMMANDS, *({f"--{field}", f"--no-{field}"} for field in fields)]
    assert not [sorted(names) for names in every if not names & named]
