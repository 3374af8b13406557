"""The trainer: what every rank runs. Knows torch, but neither Slurm nor sites."""
