"""The engines in virtual time, their cache events, and what the best choice would have been."""
