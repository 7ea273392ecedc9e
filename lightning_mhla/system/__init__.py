"""Helpers that all other packages use, for files, processes, options and access to private names of libraries."""
