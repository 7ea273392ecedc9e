"""Code shared by all generative models: flow matching, frozen VAEs, distillation, sample images and fidelity metrics."""
