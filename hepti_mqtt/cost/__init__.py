"""The costs of plans: measured devices and links, the simulator, memory, and explanations."""
