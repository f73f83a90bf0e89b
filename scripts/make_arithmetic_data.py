"""Write the arithmetic data set of the example: ``train.parquet`` and ``test.parquet`` in verl's RL format.

    python scripts/make_arithmetic_data.py --output-dir DIR

Every question is a sum of two numbers after one preamble, so a GRPO group shares nearly all of its tokens.
"""

import argparse
import sys
from pathlib import Path

from data.whole_directory import whole_directory

from verl_pg_plugin.demo import write_data


def make_arithmetic_data(output_dir: Path, *, test_size: int = 5, repeat: int = 32) -> tuple[Path, Path]:
    """Write both files, train questions ``repeat`` times each; SystemExit if the folder is not empty."""
    with whole_directory(output_dir) as scratch:
        write_data(scratch, test_size=test_size, repeat=repeat)
    return output_dir / "train.parquet", output_dir / "test.parquet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    train, test = make_arithmetic_data(parser.parse_args().output_dir)
    sys.stdout.write(f"{train}\n{test}\n")


if __name__ == "__main__":
    main()
