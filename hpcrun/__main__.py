"""``python -m hpcrun``: the same as the console script."""

import sys

# `-m` puts the current folder first on sys.path, where a user's numpy.py or secrets.py would win.
if not sys.flags.safe_path:
    del sys.path[0]

from hpcrun.cli import main

main()
