"""What the domains of captioned samples share, images and videos: a swapped transformer of diffusers, trained by flow matching."""
