"""Token files and the order in which samples are taken from them."""
