"""Mode ``direct``."""
