"""Triton backend of the operator: the kernels, their launchers, and their registration with torch."""
