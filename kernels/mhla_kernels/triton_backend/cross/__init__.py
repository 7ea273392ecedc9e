"""Cross-attention on Triton. It uses the kernels of self-attention with rows and columns from two sequences."""
