"""The relay: publishes the KV events of an engine with vLLM's ZMQ format, without a change to the engine."""
