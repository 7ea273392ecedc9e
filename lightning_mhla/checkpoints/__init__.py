"""Checkpoints: written atomically, read without running code from them, sharded, and as a start for other models."""
