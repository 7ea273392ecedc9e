"""Cross-attention on Triton. It uses the kernels of self-attention, with queries and keys from two different sequences."""
