"""What an engine links against to report its KV cache, its load and itself to kvrouter.

Engine authors import from ``kvrouter.publisher.worker`` and ``kvrouter.publisher.errors``.
"""
