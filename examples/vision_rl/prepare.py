"""Write records of generated figures, for training and for validation.

    python prepare.py OUT_DIR [--train 512] [--validation 64] [--seed 0] [--format parquet|jsonl]

Validation rows are always the same; training rows are drawn from the seed. Your own pictures: `records.make_row`.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from base import VALIDATION_SEED
from geometry import ENV_CLASS, figure
from records import make_row


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` records."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        image, text, truth = figure(draw.randrange(2**31))
        found.append(make_row(image, text, ENV_CLASS, truth))
    return found


def write(path: Path, records: list[dict[str, Any]]) -> None:
    """As parquet or jsonl, by the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--train", type=int, default=512)
    parser.add_argument("--validation", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=["parquet", "jsonl"], default="parquet")
    args = parser.parse_args(arguments)
    write(args.out_dir / f"train.{args.format}", rows(args.train, args.seed))
    write(args.out_dir / f"validation.{args.format}", rows(args.validation, VALIDATION_SEED))


if __name__ == "__main__":
    main()
