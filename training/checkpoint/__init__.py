"""Sharded checkpoints: one HDF5 file per writing rank, committed by a manifest. See docs/checkpoints.md."""
