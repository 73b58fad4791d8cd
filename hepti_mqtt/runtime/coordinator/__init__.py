"""The coordinator's session: who is there, which plans stand, and every request on its way."""
