"""The saved state: what it holds, and whether it fits the run that loads it."""
