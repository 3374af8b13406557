"""Other trainers on the same model and layout, in one run. They are installed apart: `make peers`."""
