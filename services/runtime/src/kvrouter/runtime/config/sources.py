"""Reads settings from flags, environment and file. No other module reads the environment.

docs/decisions/0016-settings-loader.md has the reasons against pydantic-settings.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, NoReturn, TypeVar, Union, get_args, get_origin

from kvrouter.runtime.config.fields import read_toml
from kvrouter.runtime.version import VERSION
from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_PREFIX = "KVROUTER_"
_CREDENTIALS = re.compile(r"//[^/@]*@")
"""User and password in a URL, which an error must not repeat."""
_TABLES = frozenset(
    {"indexer", "scheduler", "frontend", "relay", "sidecar", "engines", "mocker", "replay", "fleet", "models"}
)
"""Tables of other services and commands, and of files that may be this one, such as `--models-file`."""
_RELEASE = re.compile(r"\d+(\.\d+)*")
_SUCCESSORS: dict[str, str] = {
    "max-held": "max-queued-requests",
    "spread": "sharding",
    "spread-lag-ms": "overload-lag-ms",
    "request-stream-usage": "the engine's --enable-force-include-usage (vLLM) or "
    "--stream-response-default-include-usage (SGLang)",
}
"""Options of earlier commits that were renamed or removed, with what replaced each; empty for nothing."""


class Options(BaseModel):
    """Options of one service, as fields with their docstrings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, use_attribute_docstrings=True
    )

    section: ClassVar[str] = ""
    """The service's own table in the file; empty for the class's name before ``Settings``, in lower case."""

    @classmethod
    def table(cls) -> str:
        """Returns the name of the file's table with this service's own options."""
        return cls.section or cls.__name__.removesuffix("Settings").lower()


S = TypeVar("S", bound=Options)


class SettingsError(Exception):
    """A value is invalid or an option unknown. The message is one line that names the source of the value."""


@dataclass(frozen=True, slots=True)
class _Value:
    value: Any
    source: str
    """Where the value comes from, as the user wrote it: ``--port``, ``KVROUTER_PORT``, ``port in router.toml``."""


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    document: Mapping[str, Any]
    newer: bool
    """Whether the file is for a later release than this one, which may have options unknown to this one."""
    warnings: dict[str, None]
    """Keys ignored, each with the reason, once each."""

    def ignore_unknown(self, key: str, place: str, names: Iterable[str]) -> None:
        """Warns of a key another release knows.

        Raises:
            SettingsError: no release knows the key.
        """
        successor = _SUCCESSORS.get(_kebab(key))
        if successor is not None:
            advice = _advice(successor if "--" in successor else successor.replace("-", "_"))
            self.warnings[f"{place}: ignored, an option of an earlier release; {advice}"] = None
        elif self.newer:
            self.warnings[f"{place}: ignored, unknown to {VERSION}; the file is for a later release"] = None
        else:
            nearest = get_close_matches(_kebab(key), names, n=1)
            advice = f"did you mean {nearest[0].replace('-', '_')}?" if nearest else "--help lists all"
            raise SettingsError(f"{place}: unknown option; {advice}")


def _advice(successor: str) -> str:
    return f"use {successor}" if successor else "remove it"


def load(kind: type[S], argv: Sequence[str] | None = None, *, prog: str | None = None) -> S:
    """Returns the settings of one service. An invalid value ends the process with one line on stderr and status 2."""
    settings: S = load_all((kind,), argv, prog=prog)[0]
    return settings


def load_all(
    kinds: Sequence[type[Options]], argv: Sequence[str] | None = None, *, prog: str | None = None, about: str = ""
) -> list[Any]:
    """Returns the settings of several services in one process, from one command line.

    A flag applies to all services that have it. ``--help``, which begins with ``about``, and invalid values end the
    process.
    """
    parser = _parser(kinds, prog, about)
    try:
        return read_all(kinds, sys.argv[1:] if argv is None else argv, os.environ, parser)
    except SettingsError as error:
        parser.error(str(error))


def help_of(kinds: Sequence[type[Options]], prog: str, about: str = "") -> str:
    """Returns the help of a program with the settings of these services, as ``load_all`` shows it."""
    return _parser(kinds, prog, about).format_help()


def refuse(prog: str, message: str) -> NoReturn:
    """Ends a process with an invalid configuration: one line on stderr and exit status 2."""
    sys.stderr.write(f"{prog}: {' '.join(message.split())}\n")
    sys.exit(2)


def read_all(
    kinds: Sequence[type[Options]],
    argv: Sequence[str],
    environ: Mapping[str, str],
    parser: argparse.ArgumentParser | None = None,
) -> list[Any]:
    """Does the same as ``load_all``, with the given environment.

    Raises:
        SettingsError: a value is invalid, a key of the file unknown, or the file unreadable.
    """
    parser = parser or _parser(kinds, None)
    flags = vars(parser.parse_args(list(argv)))
    path = flags.pop("config", None) or environ.get(f"{_PREFIX}CONFIG")
    file = _read_file(Path(path)) if path else _File("", {}, newer=False, warnings={})
    known = frozenset(each for kind in kinds for each in _names_of(kind))
    settings = [_build(kind, flags, environ, file, known) for kind in kinds]
    for warning in file.warnings:
        sys.stderr.write(f"{parser.prog}: {warning}\n")
    return settings


def _build(
    kind: type[Options], flags: Mapping[str, Any], environ: Mapping[str, str], file: _File, known: frozenset[str]
) -> Options:
    from_file = dict(_from_file(kind, file, known))
    values: dict[str, _Value] = {}
    for name, field in kind.model_fields.items():
        chosen = _from_flags(name, field, flags) or _from_environment(name, field, environ) or from_file.get(name)
        if chosen is not None:
            values[name] = chosen
    try:
        return kind(**{name: _prepared(chosen.value, kind.model_fields[name]) for name, chosen in values.items()})
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(kind, problem, values) for problem in error.errors())) from None


def _explain(kind: type[Options], problem: Any, values: Mapping[str, _Value]) -> str:
    names = {alias: name for name, field in kind.model_fields.items() for alias in (name, *_aliases(field))}
    name = names.get(str(problem["loc"][0])) if problem["loc"] else None
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if name is None or name not in values:
        return message if name is None else f"--{_kebab(name)}: {message}"
    received = _CREDENTIALS.sub("//...@", str(values[name].value))
    return f"{values[name].source}: {message} (received {received[:200]!r})"


def _names(name: str, field: FieldInfo) -> list[str]:
    return list(dict.fromkeys(_kebab(each) for each in (name, *_aliases(field))))


def _aliases(field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return [choice for choice in alias.choices if isinstance(choice, str)]
    return [alias] if isinstance(alias, str) else []


def _kebab(name: str) -> str:
    return name.lower().replace("_", "-")


def _variables(name: str, field: FieldInfo) -> list[str]:
    own = [_PREFIX + each.upper().replace("-", "_") for each in _names(name, field)]
    extra = field.json_schema_extra
    foreign = extra.get("env", []) if isinstance(extra, dict) else []
    return [*own, *(str(each) for each in foreign)] if isinstance(foreign, list) else own


def _from_flags(name: str, field: FieldInfo, flags: Mapping[str, Any]) -> _Value | None:
    for each in _names(name, field):
        value = flags.get(each)
        if value is not None:
            # A list may be given in several flags, too.
            return _Value(",".join(value) if isinstance(value, list) else value, f"--{each}")
    return None


def _from_environment(name: str, field: FieldInfo, environ: Mapping[str, str]) -> _Value | None:
    for variable in _variables(name, field):
        # Deployment templates write an empty variable for an unset one.
        if environ.get(variable):
            return _Value(environ[variable], variable)
    return None


def _names_of(kind: type[Options]) -> dict[str, str]:
    """Returns the fields of a kind by each of their names."""
    return {each: name for name, field in kind.model_fields.items() for each in _names(name, field)}


def _from_file(kind: type[Options], file: _File, known: frozenset[str]) -> Iterator[tuple[str, _Value]]:
    """``known`` has the names of the options of all services in the process: one at the top may be another's."""
    names = _names_of(kind)
    own = kind.table()
    general = {key: value for key, value in file.document.items() if key not in _TABLES | {own}}
    for table, entries in (("", general), (own, file.document.get(own, {}))):
        if not isinstance(entries, Mapping):
            raise SettingsError(f"{file.path}: expected {table} to be a table")
        for key, value in entries.items():
            name = names.get(_kebab(key))
            place = f"{key} in [{table}] of {file.path}" if table else f"{key} in {file.path}"
            if name is None and not table and _kebab(key) in known:
                continue
            if name is None:
                file.ignore_unknown(key, place, names)
            else:
                yield name, _Value(value, place)


def _read_file(path: Path) -> _File:
    try:
        document = read_toml(path)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    release = document.pop("release", VERSION)
    if not isinstance(release, str) or not _RELEASE.fullmatch(release):
        raise SettingsError(f'release in {path}: expected a release such as "{VERSION}" (received {release!r})')
    return _File(str(path), document, newer=_numbers(release) > _numbers(VERSION), warnings={})


def _numbers(release: str) -> list[int]:
    """Returns the numbers of a release, such as [0, 2] for 0.2.0."""
    numbers = [int(each) for each in re.findall(r"\d+", release)]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _prepared(value: Any, field: FieldInfo) -> Any:
    """Converts a text for the field's type: lists and ``key=value`` tables by commas, ``none`` to None."""
    if not isinstance(value, str):
        return value
    types = _types(field)
    if NoneType in types and value.strip().lower() in {"", "none"}:
        return None
    if types & _LISTS:
        return [part.strip() for part in value.split(",") if part.strip()]
    if dict in types:
        return {key: entry for key, _, entry in (part.partition("=") for part in value.split(",") if part)}
    return value


_LISTS = frozenset({tuple, list, set, frozenset})


def _types(field: FieldInfo) -> set[Any]:
    """Returns the types of a field's values, without the types of their elements."""
    annotation = field.annotation
    types = get_args(annotation) if get_origin(annotation) in {Union, UnionType} else (annotation,)
    return {get_origin(each) or each for each in types}


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        for name, successor in _SUCCESSORS.items():
            if re.search(rf"--(no-)?{name}\b", message):
                option = successor if "--" in successor else f"--{successor}"
                message = f"{message}; an option of an earlier release, {_advice(successor and option)}"
        refuse(self.prog, message)


def _parser(kinds: Sequence[type[Options]], prog: str | None, about: str = "") -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog=prog,
        usage="%(prog)s [options]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{about}Options are read from flags, environment variables and a TOML file, in this order.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with options. [{_PREFIX}CONFIG]")
    known: set[str] = set()
    for kind in kinds:
        group = parser.add_argument_group(kind.table() if len(kinds) > 1 else "options of the service")
        for name, field in kind.model_fields.items():
            fresh = [each for each in _names(name, field) if each not in known]
            known.update(fresh)
            for index, each in enumerate(fresh):
                _add_flag(group, each, name, field, shown=index == 0)
    return parser


def _add_flag(group: Any, flag: str, name: str, field: FieldInfo, *, shown: bool) -> None:
    """Adds one flag. Each name of a field is a flag of its own, so an error can name the used one."""
    text = _help(name, field) if shown else argparse.SUPPRESS
    if bool in _types(field):
        group.add_argument(f"--{flag}", dest=flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        action = "append" if _types(field) & _LISTS else "store"
        group.add_argument(f"--{flag}", dest=flag, metavar="VALUE", action=action, default=None, help=text)


def _shown(default: Any) -> str:
    if default in (None, "", (), PydanticUndefined):
        return "none"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _help(name: str, field: FieldInfo) -> str:
    default = field.default
    if field.is_required():
        usage = "Required."
    elif default is PydanticUndefined and field.default_factory is not dict:
        usage = "Default: drawn at random."
    else:
        usage = f"Default: {_shown(default)}."
    others = [f"--{each}" for each in _names(name, field)[1:]]
    text = f"{field.description or ''} {usage} [{', '.join(_variables(name, field))}]"
    if others:
        text += f" Also {', '.join(others)}."
    return text.replace("%", "%%")
