"""What moves values and computes nothing: rectangles put together, number formats of the wire."""
