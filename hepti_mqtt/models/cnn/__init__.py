"""The family of convolutional nets: `family.py` first, which says what it reads, and how."""
