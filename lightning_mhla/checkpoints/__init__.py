"""Checkpoints: atomic writing, reading without running code, sharded checkpoints, and weights for new models."""
