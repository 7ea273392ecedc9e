"""Algorithms that compute attention in PyTorch, called forms, and the choice of the cheapest one."""
