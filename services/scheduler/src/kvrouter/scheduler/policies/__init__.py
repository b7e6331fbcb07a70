"""Ways to choose a rank, one file each. A new one is a file with a class ``Rule``; ``catalogue`` finds it."""
