"""Places of deliveries in their stream, by the subjects that acknowledge them."""

from __future__ import annotations

import pytest
from kvrouter.indexer.ingest.jetstream import delivery_of
from nats.aio.msg import Msg

SHORT = "$JS.ACK.stream.reader.1.26832.517.1700000000000000000.3"
LONG = "$JS.ACK.domain.ACCOUNT.stream.reader.1.26832.517.1700000000000000000.3"


@pytest.mark.parametrize("reply", [SHORT, LONG, f"{LONG}.random"])
def test_both_forms_are_read_as_the_library_reads_them(reply: str) -> None:
    expected = Msg(_client=None, reply=reply).metadata  # type: ignore[arg-type]  # no connection is needed
    assert delivery_of(reply) == (expected.sequence.stream, expected.sequence.consumer, expected.num_pending)
    assert delivery_of(reply) == (26832, 517, 3)


@pytest.mark.parametrize("reply", ["", "_INBOX.x", "$JS.ACK", "$JS.API.stream.reader.1.26832.517.17.3", "$JS.ACK.a.b"])
def test_another_subject_is_none_of_a_delivery(reply: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        delivery_of(reply)
