"""What an engine links against to report its KV cache, its load and itself to kvrouter.

Engine authors import from ``kvrouter.publisher.worker`` and ``kvrouter.publisher.errors``. Nothing is imported here, so
that a service which wants ``etcd`` or ``stream`` alone loads no more than that.
"""
