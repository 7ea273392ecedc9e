"""Helpers that all other packages use: for files, processes, options, and private names of libraries."""
