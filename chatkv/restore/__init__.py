"""From disk to the pool and back: what to load, what to compute, and saving what was computed."""
