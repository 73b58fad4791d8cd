"""Hosts to measure on: emulated in network namespaces, boards by SSH, or this machine as it is."""
