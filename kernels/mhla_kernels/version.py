"""Version of all packages of the project."""

__version__ = "0.1.0"
