"""What an engine links against to report its KV cache, its load and itself to kvrouter."""
