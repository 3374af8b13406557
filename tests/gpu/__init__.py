"""What only a GPU can tell. Nothing here is needed to build or to test."""
