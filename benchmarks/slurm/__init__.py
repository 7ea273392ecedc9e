"""Test of training on a real SLURM cluster of two virtual nodes on one machine, under faults that a job must survive."""
