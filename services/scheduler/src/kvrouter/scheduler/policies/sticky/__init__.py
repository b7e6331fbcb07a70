"""Mode ``sticky``."""
