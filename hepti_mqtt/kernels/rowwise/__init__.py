"""Rows: norms, also of rows whose columns lie on several devices, sums of parts, means of sequences."""
