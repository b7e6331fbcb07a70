"""The list of models in an OpenAI API."""

from __future__ import annotations

import msgspec
from kvrouter.engines.servers.description import Discovered


class Model(msgspec.Struct):
    """An entry of ``/v1/models``."""

    id: str
    root: str | None = None
    """Path or name that the model was loaded from."""
    parent: str | None = None
    """Base model of a LoRA adapter."""
    max_model_len: int | None = None


class Models(msgspec.Struct):
    """The page ``/v1/models``."""

    data: list[Model]

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the LoRA adapters, in order."""
        return tuple(sorted(each.id for each in self.data if each.parent))


def read_models(found: Discovered, models: Models) -> None:
    """Takes the model, its longest request and the adapters from the list of models."""
    base = next((each for each in models.data if not each.parent), None)
    if base is None:
        found.problems["model"] = "GET /v1/models lists no base model"
        return
    found.model = base.id
    found.tokenizer = base.root
    found.max_model_len = base.max_model_len
    found.lora_names = models.lora_names
