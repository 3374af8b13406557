"""A decoder-only transformer, written for tensor and pipeline parallelism."""
