"""What a prefix index does with what breaks the contract, for every implementation."""

from __future__ import annotations

import pytest
from kvrouter.core.interface import MAX_EVENT_BLOCKS
from kvrouter.v1.events_pb2 import KvEvent

from ..batches import DEVICE, RANK, batch, cleared, device_overlap, event_on_wire, removed, stored


class TestHostileInput:
    def test_unknown_parents_are_counted_and_mark_the_rank(self, index_class: type) -> None:
        index = index_class()
        summary = index.apply(batch(0, stored([102], [2], parent=101), stored([201], [5])))
        assert (summary.unknown_parents, summary.applied, summary.next_event_id) == (1, 1, 2)
        assert index.ranks()[0].partial
        assert (device_overlap(index, 2), device_overlap(index, 5)) == (0, 1)

    @pytest.mark.parametrize(
        "event",
        [
            KvEvent(tier=DEVICE),
            stored([], []),
            stored([], [], parent=101),
            stored([1, 2], [1]),
            stored([1], [1, 2]),
            stored([1], []),
            stored([], [1]),
            stored([1, 2, 1], [1, 2, 3]),
            stored([1, 2], [1, 2], parent=2),
            stored([101], [1], parent=101),
            stored([1], [1], tier=6),
            stored([1], [1], tier=-1),
            removed(),
            removed(101, tier=6),
            cleared(6),
            cleared(-1),
            stored(range(1, MAX_EVENT_BLOCKS + 2), range(1, MAX_EVENT_BLOCKS + 2)),
            removed(*range(MAX_EVENT_BLOCKS + 1)),
        ],
        ids=lambda event: str(event).replace("\n", " ")[:60],
    )
    def test_events_that_break_the_contract_are_skipped(self, index_class: type, event: KvEvent) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [9])))
        digest = index.digest(RANK)
        summary = index.apply(batch(1, event))
        assert (len(summary.rejected), summary.applied, summary.next_event_id) == (1, 0, 2)
        assert (summary.unknown_parents, summary.stored_blocks, summary.removed_blocks) == (0, 0, 0)
        assert index.ranks()[0].partial
        assert index.digest(RANK) == digest
        assert index.apply(batch(2, stored([102], [8], parent=101))).applied == 1
        assert device_overlap(index, 9, 8) == 2

    def test_a_store_of_the_largest_size_is_applied(self, index_class: type) -> None:
        index = index_class()
        summary = index.apply(batch(0, stored(range(MAX_EVENT_BLOCKS), range(MAX_EVENT_BLOCKS))))
        assert summary.stored_blocks == MAX_EVENT_BLOCKS

    def test_reasons_are_bounded(self, index_class: type) -> None:
        summary = index_class().apply(batch(0, *(removed() for _ in range(100))))
        assert (len(summary.rejected), summary.next_event_id) == (16, 100)

    @pytest.mark.parametrize("data", [b"\xff", b"\x22\x05\x08", b"\x00", b"\x08" + b"\xff" * 11, b"\x22\x02\x2a\xff"])
    def test_what_cannot_be_parsed_changes_nothing(self, index_class: type, data: bytes) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1])))
        for malformed in (data, batch(1, removed(101)) + data):
            summary = index.apply(malformed)
            assert summary.unparsable
            assert (summary.worker_id, summary.dp_rank, summary.applied) == (0, 0, 0)
        assert device_overlap(index, 1) == 1
        assert index.cursor(RANK) == (1, 1)
        assert len(index.ranks()) == 1

    def test_an_empty_message_is_a_batch_of_rank_0(self, index_class: type) -> None:
        index = index_class()
        summary = index.apply(b"")
        assert not summary.unparsable
        assert index.cursor((0, 0)) == (0, 0)

    def test_unknown_fields_are_ignored(self, index_class: type) -> None:
        index = index_class()
        varint, fixed64, text, fixed32 = (
            b"\xf8\x07\x01",
            b"\xf9\x07" + b"\0" * 8,
            b"\xfa\x07\x02hi",
            b"\xfd\x07" + b"\0" * 4,
        )
        event = stored([101], [1])
        event.event_id = 1
        data = batch(0, stored([102], [2])) + varint + fixed64 + text + fixed32 + event_on_wire(event, text + fixed32)
        assert index.apply(data).applied == 2

    def test_unpacked_and_repeated_fields_are_read_as_protobuf_has_it(self, index_class: type) -> None:
        """Repeated numbers may come one by one; of single fields and of a oneof the last counts."""
        one = b"".join(b"\x11" + engine.to_bytes(8, "little") for engine in (101, 102))
        two = b"".join(b"\x19" + local.to_bytes(8, "little") for local in (1, 2))
        chain = b"\x1a" + bytes([len(one + two)]) + one + two
        removal = b"\x22\x09\x09" + (101).to_bytes(8, "little")
        event = b"\x08\x07\x08\x00" + removal + chain
        index = index_class()
        assert index.apply(b"\x08\x05\x08\x07\x22" + bytes([len(event)]) + event).stored_blocks == 2
        assert device_overlap(index, 1, 2) == 2
