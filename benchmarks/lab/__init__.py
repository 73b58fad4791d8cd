"""Hosts to measure on: emulated in network namespaces, or this machine as it is."""
