"""Cross-attention, in which queries read keys and values of a second sequence with its own length and blocks."""
