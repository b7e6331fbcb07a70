"""The relay: publishes the KV events of an engine that speaks vLLM's ZMQ format, without a change to the engine."""
