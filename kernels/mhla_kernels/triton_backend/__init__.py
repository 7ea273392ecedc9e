"""The operator in Triton: kernels, what launches them, and their registration with torch."""
