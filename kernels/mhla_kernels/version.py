"""Version of all packages of this repository."""

__version__ = "0.1.0"
