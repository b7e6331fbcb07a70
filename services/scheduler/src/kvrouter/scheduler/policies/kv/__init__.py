"""Mode ``kv``."""
