"""A device's session: plans that are prepared and held, runs and their ops; and the executor."""
