"""Mode ``power-of-two``."""
