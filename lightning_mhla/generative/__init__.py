"""Parts that the generative domains share: flow matching, frozen VAEs, distillation, samples and fidelity metrics."""
