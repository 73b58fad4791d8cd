"""The coordinator: the devices, plans, queues and runs of a site, without I/O."""
