"""Write a directory atomically, even if two runs write it at once."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def whole_directory(output_dir: Path) -> Iterator[Path]:
    """Yield a scratch directory, renamed to ``output_dir`` at the end; SystemExit if that is not empty."""
    if output_dir.is_dir() and any(output_dir.iterdir()):
        sys.exit(f"error: {output_dir} is not empty; remove it or name another folder")
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}-") as parent:
        scratch = Path(parent) / output_dir.name
        scratch.mkdir()
        yield scratch
        try:
            os.replace(scratch, output_dir)
        except OSError:
            # Another process may have written the same directory; its content is equal.
            if not (output_dir.is_dir() and any(output_dir.iterdir())):
                raise
