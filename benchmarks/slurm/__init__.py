"""Training on a real SLURM of two nodes on this machine, and every fault that it has to survive."""
