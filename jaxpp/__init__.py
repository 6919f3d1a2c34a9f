"""jaxpp."""
