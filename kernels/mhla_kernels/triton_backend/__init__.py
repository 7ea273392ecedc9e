"""Triton backend of the attention operator: the kernels, the functions that launch them, and the registration with torch."""
