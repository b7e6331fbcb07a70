"""Publishes a block in vLLM's ZMQ format and decodes it: ``engines.py NATS_URL ETCD_ENDPOINT``. Uses neither."""

from __future__ import annotations

import zmq
from kvrouter.engines.events.vllm_sglang_events import Stored, decode_batch
from kvrouter.engines.events.zmq_frames import read_published
from kvrouter.engines.events.zmq_publisher import ZmqPublisher

with zmq.Context() as context, context.socket(zmq.SUB) as consumer:
    consumer.subscribe(b"")
    port = consumer.bind_to_random_port("tcp://127.0.0.1")
    with ZmqPublisher(f"tcp://127.0.0.1:{port}", block_size=2, connects=True) as publisher:
        received: list[bytes] = []
        while not received:  # Messages before the subscription arrives are dropped.
            publisher.stored(token_ids=[1, 2], engine_hashes=[11], parent=None)
            received = consumer.recv_multipart() if consumer.poll(100) else []
        message = read_published(received)
        assert message is not None
        (event,) = decode_batch(message.payload, "vllm").events
        assert isinstance(event, Stored), event
