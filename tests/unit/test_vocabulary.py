"""Retired terms stay out of the code, the contract and the documents. docs/glossary.md has the terms in use."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = (
    *("bench", "cli", "core", "deploy", "devtools", "docs", "examples", "net"),
    *("protos", "services", "simulator", "tests"),
)

IN_NAMES = frozenset(
    {
        *("aside", "ebb", "epoch", "figures", "floating", "leash", "ledger", "roster"),
        *("screening", "seat", "spill", "spot", "survey", "takeover", "tidy", "told"),
    }
)
"""Whole words of identifiers, options, metrics and log events."""
IN_PROSE = ("ebb", "leash", "ledger", "light transport", "roster", "set aside", "spill", "takeover")
"""Words of documents, comments and texts that have no other meaning here."""

NAMES_IN_USE = {"_EPOCH": "the Unix epoch", "UNIX_EPOCH": "the Unix epoch"}
"""Identifiers with a retired word that means something else, and what it means."""

_SOURCES = sorted(
    path
    for part in PARTS
    for pattern in ("*.py", "*.rs", "*.proto")
    for path in (ROOT / part).rglob(pattern)
    if not {"target", "build", "__pycache__"} & set(path.relative_to(ROOT).parts)
    and not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    and path != Path(__file__)
)
_DOCUMENTS = sorted({*ROOT.glob("*.md"), *(path for part in PARTS for path in (ROOT / part).rglob("*.md"))})
_ANY_TERM = re.compile("|".join((*IN_NAMES, *IN_PROSE)).replace(" ", r"\s+"), re.IGNORECASE)
"""Finds the few files worth splitting into tokens, which takes seconds for all of them."""
_COMMENT = re.compile(r"//[^\n]*")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parts_of(name: str) -> set[str]:
    """The words of an identifier, an option, a metric or a log event."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)}


def names_and_prose(path: Path) -> tuple[Iterator[tuple[int, str]], Iterator[tuple[int, str]]]:
    """The identifiers of a source, and its comments and texts, each with its line."""
    text = path.read_text(encoding="utf-8")
    if not _ANY_TERM.search(text):
        return iter(()), iter(())
    if path.suffix == ".py":
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        names = ((each.start[0], each.string) for each in tokens if each.type == tokenize.NAME)
        prose = ((each.start[0], each.string) for each in tokens if each.type not in {tokenize.NAME, tokenize.OP})
        return names, prose
    lines = list(enumerate(text.splitlines(), start=1))
    code = ((number, _COMMENT.sub("", _STRING.sub('""', line))) for number, line in lines)
    names = ((number, name) for number, line in code for name in _NAME.findall(line))
    prose = ((number, each) for number, line in lines for each in (*_COMMENT.findall(line), *_STRING.findall(line)))
    return names, prose


def test_no_identifier_has_a_retired_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _SOURCES
        for line, name in names_and_prose(path)[0]
        if parts_of(name) & IN_NAMES and name not in NAMES_IN_USE
    ]
    assert not found, "\n".join(found)


def test_no_option_metric_or_log_event_has_a_retired_word() -> None:
    pages = [ROOT / "docs" / "reference" / name for name in ("options.md", "metrics.md", "log-events.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    assert len(named) > 200
    assert not [name for name in named if parts_of(name) & IN_NAMES]


def retired_in(text: str) -> set[str]:
    """The retired terms of prose in a text."""
    plain = " ".join(text.lower().split())
    return {term for term in IN_PROSE if re.search(rf"\b{term}s?\b", plain)}


def test_no_comment_or_text_has_a_retired_term() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {', '.join(terms)}"
        for path in _SOURCES
        for line, text in names_and_prose(path)[1]
        if (terms := retired_in(text))
    ]
    assert not found, "\n".join(found)


def test_no_document_has_a_retired_term() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {', '.join(terms)}"
        for path in _DOCUMENTS
        if (terms := retired_in(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)
