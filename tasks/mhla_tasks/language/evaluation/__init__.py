"""Scores by lm-evaluation-harness: from the command line, and while a model trains."""
