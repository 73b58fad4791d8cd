"""The worker: the plans, runs and KV caches of one device without I/O, and the executor of their ops."""
