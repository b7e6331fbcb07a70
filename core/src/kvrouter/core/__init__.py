"""Hashing, prefix index and active sequences: what is done per block.

``KVROUTER_CORE=reference`` chooses the plain Python reference; otherwise the Rust core is used where it is built.
"""
