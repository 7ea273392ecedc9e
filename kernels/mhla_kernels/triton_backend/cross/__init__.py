"""Cross-attention with the Triton kernels of self-attention, whose rows and columns are then tokens of different sequences."""
