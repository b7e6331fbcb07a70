"""Options of the services a router runs, given once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.v1.errors import BadRequest
from pydantic import AliasChoices, ValidationError

S = TypeVar("S", bound=ServiceSettings)


def settings_of(kind: type[S], options: Mapping[str, Any]) -> S:
    """Returns a service's settings: those of the options it has.

    Raises:
        BadRequest: the value of an option is invalid.
    """
    names = option_names(kind)
    try:
        return kind(**{name: value for name, value in options.items() if name in names})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise BadRequest(
            f"option {field}: {first['msg']}", field=field, advice="docs/reference/options.md lists options and values."
        ) from None


def check_names(kinds: list[type[ServiceSettings]], options: Mapping[str, Any]) -> None:
    """Refuses options that none of the services has.

    Raises:
        BadRequest: an option is unknown.
    """
    known = set().union(*map(option_names, kinds))
    for name in options.keys() - known:
        raise BadRequest(
            f"no option is named {name!r}", field=name, advice="docs/reference/options.md lists them, with underscores."
        )


def option_names(kind: type[ServiceSettings]) -> set[str]:
    """Returns the names of a service's options, with their further names."""
    names = set(kind.model_fields)
    for field in kind.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            names.update(str(choice) for choice in field.validation_alias.choices)
    return names
