"""What travels: topics, tensor frames, control messages, weight manifests. Bytes in, values out; no input or output."""
