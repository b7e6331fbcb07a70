"""Ways to choose a rank, a folder each. A new one is a folder with ``policy.py``; ``catalogue`` finds it."""
