"""What a cluster is: its limits, its fabric, its file systems. One YAML per site."""
