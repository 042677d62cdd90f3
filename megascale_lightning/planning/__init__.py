"""From metadata to a plan: mix, pack, distribute, and the state around every step."""
