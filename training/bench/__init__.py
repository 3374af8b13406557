"""How fast the trainer is: its layouts and a plain loop, in turns on one machine."""
