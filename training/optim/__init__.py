"""AdamW, its schedule and the global gradient norm."""
