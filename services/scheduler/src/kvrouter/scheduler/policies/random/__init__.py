"""Mode ``random``."""
