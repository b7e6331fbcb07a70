"""Request and response bodies of ``/busy_threshold``.

``POST`` sets the given thresholds. A threshold of null is cleared, an absent one is left as it is; a body
without thresholds only reads. The response has the thresholds in force, null if there is none. ``GET`` lists the
models with a threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from google.protobuf.field_mask_pb2 import FieldMask
from kvrouter.frontend.edge.json_body import check_uint64, decode_json
from kvrouter.v1.common_pb2 import BusyThresholds
from kvrouter.v1.scheduler_pb2 import SetBusyThresholdRequest
from msgspec import UNSET, UnsetType

_THRESHOLDS = ("active_decode_blocks_threshold", "active_prefill_tokens_threshold")


class BusyThresholdBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a ``POST``."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    active_decode_blocks_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] | msgspec.UnsetType | None = (
        msgspec.UNSET
    )
    """Share of a rank's blocks above which the rank is busy, 0 to 1."""
    active_prefill_tokens_threshold: Annotated[int, msgspec.Meta(ge=0)] | UnsetType | None = UNSET
    """Prefill tokens above which a rank is busy."""

    @classmethod
    def parse(cls, body: bytes | bytearray) -> BusyThresholdBody:
        """Parses a body.

        Raises:
            BadRequest: it is not JSON, or a field is missing, unknown or out of range; the error names the field.
        """
        advice = "Send the model, with the thresholds to set, or without any to read them."
        parsed = decode_json(_DECODER, body, lambda _: advice)
        check_uint64({"active_prefill_tokens_threshold": parsed.active_prefill_tokens_threshold or None})
        return parsed

    def to_request(self) -> SetBusyThresholdRequest:
        """Returns the request for the Scheduler."""
        values = {name: getattr(self, name) for name in _THRESHOLDS}
        return SetBusyThresholdRequest(
            model=self.model,
            thresholds=BusyThresholds(**{name: value for name, value in values.items() if value is not UNSET}),
            cleared=FieldMask(paths=[name for name, value in values.items() if value is None]),
        )


_DECODER = msgspec.json.Decoder(BusyThresholdBody)


def shown(model: str, thresholds: BusyThresholds) -> dict[str, Any]:
    """Returns one model's thresholds as a JSON object."""
    return {"model": model} | {name: getattr(thresholds, name) if name in thresholds else None for name in _THRESHOLDS}


def listed(thresholds: Mapping[str, BusyThresholds]) -> dict[str, Any]:
    """Returns all models' thresholds as a JSON object, in order of name."""
    return {"thresholds": [shown(model, thresholds[model]) for model in sorted(thresholds)]}
