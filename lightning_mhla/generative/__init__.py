"""What generative domains share: flow matching, frozen encoders and VAEs, adapters, distillation, samples, fidelity."""
