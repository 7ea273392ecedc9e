"""Helpers for files, processes, options and access to private names of libraries, which all other packages use."""
