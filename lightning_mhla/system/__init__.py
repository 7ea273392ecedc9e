"""Files, processes and options: what everything above stands on."""
