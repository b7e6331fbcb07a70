"""The publisher SDK: an engine links it to register as a worker and to report its KV cache and its load.

Engine authors import from ``kvrouter.publisher.worker`` and ``kvrouter.publisher.errors``.
"""
