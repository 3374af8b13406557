"""What a rank reports while it works."""
