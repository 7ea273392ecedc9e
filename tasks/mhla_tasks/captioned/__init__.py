"""Code shared by text-to-image and text-to-video models, which train diffusers transformers with replaced attention."""
