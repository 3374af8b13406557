"""The run directory: creating it, and reading back what happened in it."""
