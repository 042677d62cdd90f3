"""Runs knobs one after the other on the ranks of a DDP run, and writes down, per rank, what happened in each.

Run by the tests as a program of its own, since DDP starts it again for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.integrations.bench import Bench  # noqa: E402
from tests.integrations.knobs import KNOBS, knobs_for  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    found = {}
    for name in knobs_for(arguments.rows):
        try:
            found[name] = KNOBS[name].run(Bench(arguments.corpus, 2, arguments.rows, name))
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
        (arguments.out / f"{arguments.rows}-rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
