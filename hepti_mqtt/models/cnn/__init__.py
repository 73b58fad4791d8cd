"""The family of convolutional nets: begin with `family.py`."""
