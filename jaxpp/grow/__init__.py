"""Growth: a checkpoint into a larger model that computes the same function."""
