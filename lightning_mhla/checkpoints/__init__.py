"""Checkpoints: atomic writing, reading without running code, sharded checkpoints, and pretrained weights for new models."""
