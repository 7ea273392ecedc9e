"""Generative models: flow matching."""
