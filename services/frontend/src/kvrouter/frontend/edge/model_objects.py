"""The models of ``GET /v1/models``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvrouter.v1.frontend_pb2 import Model


def model_objects(models: Iterable[Model]) -> dict[str, dict[str, Any]]:
    """Returns models by name, then LoRA adapters, which name their model as parent as in vLLM."""
    objects: dict[str, dict[str, Any]] = {}
    adapters: dict[str, dict[str, Any]] = {}
    for model in models:
        objects[model.name] = _model_object(model, model.name, None)
        for name in model.lora_names:
            adapters.setdefault(name, _model_object(model, name, model.name))
    return {**objects, **{name: adapter for name, adapter in adapters.items() if name not in objects}}


def _model_object(model: Model, name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "kvrouter",
        "root": parent or name,
        "parent": parent,
        "max_model_len": model.max_model_len or None,
        "block_size": model.block_size,
        "workers": model.workers,
    }
