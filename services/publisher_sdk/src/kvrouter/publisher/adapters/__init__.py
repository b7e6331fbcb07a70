"""Adapters: they translate the cache events of particular engines into calls of the SDK.

Everything specific to an engine ends here. ``zmq_events`` and ``zmq_messages`` need the extra ``zmq``.
"""
