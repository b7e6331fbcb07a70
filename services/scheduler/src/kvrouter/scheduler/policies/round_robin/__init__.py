"""Mode ``round-robin``."""
