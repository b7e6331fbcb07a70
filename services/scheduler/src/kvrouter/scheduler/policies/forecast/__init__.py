"""Mode ``forecast``."""
