"""Attention: over ragged sequences, by blocks of keys and their combination, and over a decoder's cache."""
