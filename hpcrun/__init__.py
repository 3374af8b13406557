"""hpcrun: submit, survive and understand multi-node PyTorch training on Slurm."""

__version__ = "0.1.0"
