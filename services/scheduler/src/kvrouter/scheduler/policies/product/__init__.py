"""Mode ``product``."""
