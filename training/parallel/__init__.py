"""Process groups, tensor parallelism, pipeline stages and gradient reduction."""
