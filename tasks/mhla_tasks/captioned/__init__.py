"""Code shared by text-to-image and video: diffusers transformers with replaced attention, trained by flow matching."""
