"""A model of one LLM engine rank, in Python and in Rust. It tests the router, so it shares no code with it."""
