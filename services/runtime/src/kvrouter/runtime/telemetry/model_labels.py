"""The label ``model`` of metrics, bounded: whoever registers models could otherwise add series without end."""

from __future__ import annotations

from collections.abc import Collection

MAX_MODELS = 256
"""Models with series of their own."""
OTHER_MODELS = "other"
"""Label of further models."""


def model_label(model: str, labelled: Collection[str]) -> str:
    """Returns the label of a model: its name, or ``OTHER_MODELS`` if too many others have series already."""
    return model if model in labelled or len(labelled) < MAX_MODELS else OTHER_MODELS
