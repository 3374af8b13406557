"""Checkpoints by hand, without torch: what is in them, whether they are whole, from and to other formats."""
