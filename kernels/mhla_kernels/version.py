"""The version, of all packages together."""

__version__ = "0.1.0"
