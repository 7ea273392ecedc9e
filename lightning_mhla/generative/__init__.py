"""Shared by generative domains: flow matching, frozen encoders and VAEs, adapters, distillation, samples, fidelity."""
