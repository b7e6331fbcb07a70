"""The state of a rank's cache, and the numbered events that lead there."""
