"""What plans cost: devices and links as measured, the simulator, memory, and their explanation."""
