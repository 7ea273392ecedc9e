"""Training on a real SLURM of two virtual nodes on one machine, and the faults that it must survive."""
