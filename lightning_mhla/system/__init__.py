"""Helpers for files, processes and options that all other packages use."""
