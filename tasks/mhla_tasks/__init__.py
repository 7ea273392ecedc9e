"""Training domains, one package each, and the command line that trains their models."""
