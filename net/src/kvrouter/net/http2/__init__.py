"""Connections with gRPC calls, read and written on the event loop.

grpc.aio reads in a thread and wakes the event loop for each message, which costs several times as much as the message
itself, and a channel costs it a millisecond. A call stream lasts for hours and has all calls between two processes, so
its client has a connection of its own here, as have rare calls of thousands of servers (``responses``).
``kvrouter.net.rpc.loop_server`` serves the calls of all clients.
"""

from kvrouter.net.http2.connection import GrpcConnection
from kvrouter.net.http2.endpoint import ConnectionLost
from kvrouter.net.http2.metadata import Metadata
from kvrouter.net.http2.received_call import ReceivedCall
from kvrouter.net.http2.side import Http2Violation

__all__ = ["ConnectionLost", "GrpcConnection", "Http2Violation", "Metadata", "ReceivedCall"]
