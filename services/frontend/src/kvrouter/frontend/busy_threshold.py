"""The body of ``/busy_threshold``, read and written as the guide documents it.

``POST`` with a threshold sets it and leaves the other; without any it reads them. Both answer with what is in force,
null where a threshold is off. ``GET`` lists the models that have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from kvrouter.frontend.json_body import read_body
from kvrouter.v1.scheduler_pb2 import BusyThresholds, SetBusyThresholdRequest
from pydantic import BaseModel, ConfigDict, Field


class BusyThresholdBody(BaseModel):
    """What is posted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(min_length=1)
    active_decode_blocks_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of its blocks above which a rank is busy, 0 to 1."""
    active_prefill_tokens_threshold: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    """Prefill tokens above which a rank is busy."""

    @classmethod
    def parse(cls, body: bytes) -> BusyThresholdBody:
        """Reads a body.

        Raises:
            BadRequest: it is not JSON, or a field is missing, unknown or out of range; the error names it.
        """
        return read_body(cls, body, lambda _: "Send the model, with thresholds to set them or without to read them.")

    def to_request(self) -> SetBusyThresholdRequest:
        """As the Scheduler's contract has it."""
        thresholds = BusyThresholds(
            active_decode_blocks_threshold=self.active_decode_blocks_threshold,
            active_prefill_tokens_threshold=self.active_prefill_tokens_threshold,
        )
        return SetBusyThresholdRequest(model=self.model, thresholds=thresholds)


def shown(model: str, thresholds: BusyThresholds) -> dict[str, Any]:
    """The thresholds of one model, as JSON has them."""
    names = ("active_decode_blocks_threshold", "active_prefill_tokens_threshold")
    return {"model": model} | {name: getattr(thresholds, name) if thresholds.HasField(name) else None for name in names}


def listed(thresholds: Mapping[str, BusyThresholds]) -> dict[str, Any]:
    """Those of every model, in order of name."""
    return {"thresholds": [shown(model, thresholds[model]) for model in sorted(thresholds)]}
