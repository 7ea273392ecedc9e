"""Shared by the domains of captioned images and videos: swapped transformers of diffusers, trained by flow matching."""
