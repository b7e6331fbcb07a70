"""The file of models: names for models, their fallbacks and canaries. Pure but for reading the file.

    [models.chat]                       # a name that clients send
    serves = "llama-3.3-70b"            # the model it stands for; without it, the model of that name
    pools = ["reserved", "spot"]        # components of it that serve, in this order; without it all, the cheapest first
    fallbacks = ["llama-3.1-8b"]        # models that serve if it cannot, in this order

    [models.chat.canary]
    model = "llama-4-70b"
    share = 0.05                        # part of the sessions, and of the requests without one
    header = "x-canary"                 # always and never choose the side

The models of an entry are served models and LoRA adapters, never names of other entries, so no entry leads to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec
from kvrouter.frontend.request.current_choice import ModelChoice, Reason
from kvrouter.runtime.config.fields import read_toml

_MAX_NAMES = 1000
_MAX_FILE_BYTES = 4 << 20
_Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]+\Z")]
_Header = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9-]{0,64}\Z")]


class ModelFileError(ValueError):
    """The file cannot be used. The message says why."""


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that serves a part of a name's requests."""

    model: _Name
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    header: _Header = ""
    """Name of the header that chooses a side; empty for none."""

    def takes(self, name: str, session: str, headers: Mapping[str, str], draw: float) -> bool:
        """Returns whether the canary serves a request.

        A session is on the side of its digest: on each Frontend, and after restarts. A larger share moves sessions to
        the canary only.

        Args:
            name: The name the client sent.
            session: The session of the request; empty for none.
            headers: Its headers, by name in any or in lower case.
            draw: A random number from 0 to 1, for a request without a session.
        """
        side = headers.get(self.header.lower(), "").strip().lower() if self.header else ""
        if side in ("always", "never"):
            return side == "always"
        if session:
            digest = blake2b(f"{name}\0{session}".encode(errors="surrogateescape"), digest_size=8).digest()
            draw = int.from_bytes(digest) / (1 << 64)
        return draw < self.share


class ModelRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file."""

    serves: Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*\Z")] = ""
    """The model the name stands for; empty if that is the model of this name."""
    pools: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=8)] = ()
    """Names of the components of this model that serve, those that are preferred first; all of them if empty."""
    fallbacks: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=8)] = ()
    canary: Canary | None = None

    def models(self) -> Iterator[str]:
        """Yields the models it names."""
        if self.serves:
            yield self.serves
        yield from self.fallbacks
        if self.canary is not None:
            yield self.canary.model


def ordered(
    name: str, rule: ModelRule, session: str, headers: Mapping[str, str], draw: float
) -> tuple[ModelChoice, ...]:
    """Returns the models for a request, the preferred one first, each once, or once for each of its pools.

    The arguments are those of ``Canary.takes``.
    """
    serving = [(rule.serves or name, pool) for pool in rule.pools or ("",)]
    further = dict.fromkeys([*serving, *((model, "") for model in rule.fallbacks)])
    (model, pool), reason = serving[0], Reason.ALIAS if rule.serves else Reason.NAME
    if rule.canary is not None and rule.canary.takes(name, session, headers, draw):
        model, pool, reason = rule.canary.model, "", Reason.CANARY
    further.pop((model, pool), None)
    others = (ModelChoice(name, each, Reason.FALLBACK, pool) for each, pool in further)
    return (ModelChoice(name, model, reason, pool), *others)


def read_model_rules(path: Path) -> dict[str, ModelRule]:
    """Reads the table ``models`` of a file, which may have other tables.

    Raises:
        ModelFileError: the file cannot be read, or an entry is invalid.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelFileError(f"{path} is longer than {_MAX_FILE_BYTES} bytes")
        document = read_toml(path)
        rules = msgspec.convert(document.get("models", {}), dict[_Name, ModelRule])
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise ModelFileError(f"models in {path}: {error}") from None
    except ValueError as error:
        raise ModelFileError(str(error)) from None
    if len(rules) > _MAX_NAMES:
        raise ModelFileError(f"models in {path}: expected at most {_MAX_NAMES} entries, found {len(rules)}")
    aliases = {name: rule.serves for name, rule in rules.items() if rule.serves}
    for name, rule in rules.items():
        for model in rule.models():
            if model in aliases:
                raise ModelFileError(
                    f"models.{name} in {path}: {model!r} stands for {aliases[model]!r}: name that model instead"
                )
    return rules
