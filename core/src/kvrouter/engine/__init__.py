"""The simulated engine in Rust. ``kvrouter.mocker.engine.reference`` says what it does, and is its oracle.

It judges the router, so it shares no code with ``kvrouter.core``. Where there was no Rust toolchain at build time it is
missing, and the mocker and the simulator use the oracle.
"""
