"""HTTP for programs that speak OpenAI's, TEI's or Ollama's interface: `hepti gateway`; Wyoming: `hepti wyoming`.

Every route turns a body into requests of the Python client; there is no second path to the devices.
"""
