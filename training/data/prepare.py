"""``python -m training.data.prepare``: text files to a flat file of byte tokens (vocabulary 256).

Example: python -m training.data.prepare --stdlib tokens.bin
         python -m training.data.prepare book1.txt book2.txt --out tokens.bin
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from hpcrun.errors import UserError


def write_bytes(sources: Iterable[Path], out: Path) -> int:
    """The bytes of ``sources`` one after the other, whole or not at all; returns how many."""
    temporary = out.with_name(f".{out.name}.tmp")
    total = 0
    try:
        with temporary.open("wb") as target:
            for source in sources:
                total += target.write(source.read_bytes())
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{error.filename or out}: {error.strerror}") from error
    return total


def standard_library() -> list[Path]:
    """The sources of Python's own top-level modules, in the order of their names: always at hand."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument(
        "--stdlib", type=Path, metavar="OUT", help="use the source of Python's standard library"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    out = arguments.stdlib or arguments.out
    sources = standard_library() if arguments.stdlib else arguments.files
    if out is None or not sources:
        parser.error("give FILES and --out OUT, or --stdlib OUT")
    try:
        total = write_bytes(sources, out)
    except UserError as error:
        print(f"training.data.prepare: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {total} tokens (uint8) of {len(sources)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
