"""Forms of the operator in PyTorch, and the choice between them."""
