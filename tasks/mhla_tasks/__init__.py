"""Training tasks, one package each, and the command-line program ``lightning`` that trains and evaluates their models."""
