"""Busy thresholds that are set, left and cleared by a request."""

from __future__ import annotations

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.request.options import Thresholds, ThresholdUpdate
from kvrouter.v1.common_pb2 import BusyThresholds
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.scheduler_pb2 import SetBusyThresholdRequest


async def test_a_cleared_threshold_falls_back_to_the_option() -> None:
    own = ThresholdBoard(Thresholds(decode_blocks=0.9))
    assert await own.update("m", ThresholdUpdate(Thresholds(0.5, 100))) == Thresholds(0.5, 100)
    assert await own.update("m", ThresholdUpdate(Thresholds(), clear_decode_blocks=True)) == Thresholds(0.9, 100)
    assert await own.update("m", ThresholdUpdate(Thresholds(), clear_prefill_tokens=True)) == Thresholds(0.9, None)


def test_a_threshold_that_is_set_and_cleared_at_once_is_refused() -> None:
    thresholds = BusyThresholds(active_prefill_tokens_threshold=5)
    request = SetBusyThresholdRequest(
        thresholds=thresholds, cleared=FieldMask(paths=["active_prefill_tokens_threshold"])
    )
    with pytest.raises(BadRequest, match="both set and cleared"):
        ThresholdUpdate.of(request)


def test_a_request_clears_the_thresholds_that_it_names() -> None:
    cleared = FieldMask(paths=["active_decode_blocks_threshold"])
    request = SetBusyThresholdRequest(thresholds=BusyThresholds(active_prefill_tokens_threshold=5), cleared=cleared)
    assert ThresholdUpdate.of(request).apply(Thresholds(0.5, 100)) == Thresholds(None, 5)


def test_an_unknown_threshold_is_not_cleared() -> None:
    with pytest.raises(BadRequest, match="is no threshold") as refused:
        ThresholdUpdate.of(SetBusyThresholdRequest(cleared=FieldMask(paths=["threshold"])))
    assert refused.value.known_values == ("active_decode_blocks_threshold", "active_prefill_tokens_threshold")


def test_a_request_without_fields_changes_nothing() -> None:
    assert not ThresholdUpdate.of(SetBusyThresholdRequest())
