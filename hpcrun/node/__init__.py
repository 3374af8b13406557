"""What runs on a compute node: one agent per node, which starts and watches the ranks."""
