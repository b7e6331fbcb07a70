"""A model of one LLM engine rank, in plain Python and in Rust. It judges the router, and shares no code with it."""
