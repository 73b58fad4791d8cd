"""Layouts: a family's graph and a method's table make the Programs of all devices."""
