"""What the domains of captioned images and videos share: swapped transformers of diffusers, trained by flow matching."""
