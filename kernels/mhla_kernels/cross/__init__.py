"""Cross-attention: queries read keys and values of another sequence, which has its own length and blocks."""
