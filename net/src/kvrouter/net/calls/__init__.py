"""Call streams: many calls between two processes on one long-lived stream, in batches (kvrouter/v1/calls.proto).

``ClientStream`` and ``ServerStream`` are the two sides of a stream without I/O: they form messages of waiting items,
and apply a message or the end of the stream to each call. ``CallStreamClient`` and ``CallStreamServer`` run
them over gRPC. A message has all ready items when the stream can take it. No timer delays anything.
"""

from kvrouter.net.calls.client import CallStreamClient
from kvrouter.net.calls.errors import (
    CallTimedOut,
    NotSent,
    OutcomeUnknown,
)
from kvrouter.net.calls.limits import CallLimits, CallStreamCounts
from kvrouter.net.calls.running_call import ResponseReceiver, RunningCall
from kvrouter.net.calls.server import SERVICE, CallStreamServer
from kvrouter.net.calls.server_call import Peer, PeerCheck, ServerCall

__all__ = [
    "SERVICE",
    "CallLimits",
    "CallStreamClient",
    "CallStreamCounts",
    "CallStreamServer",
    "CallTimedOut",
    "NotSent",
    "OutcomeUnknown",
    "Peer",
    "PeerCheck",
    "ResponseReceiver",
    "RunningCall",
    "ServerCall",
]
