"""Checkpoints: atomic writing, reading without running code, sharded checkpoints, and loading of pretrained weights."""
