"""Experiments as files: what is measured, in which order, checked first, and how the results are written down."""
