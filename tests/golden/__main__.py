"""`python -m tests.golden [--write]`: compares the goldens with transformers, or writes them. Needs torch."""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests import tiny
from tests.golden.reference import path, summary, torch_logits
from tests.tolerances import TOLERANCES


def main() -> int:
    """Compares or writes the goldens of all families; 1 when one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the goldens by what transformers computes now")
    write = parser.parse_args().write
    status = 0
    for family, config in tiny.CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            ids = tiny.token_ids()
            arrays = summary(torch_logits(tiny.write_checkpoint(Path(folder) / family, config), ids), ids)
        target = path(family)
        if write:
            np.savez_compressed(target, **arrays)
            print(f"{target}: {target.stat().st_size} bytes")
            continue
        with np.load(target) as golden:
            error = max(float(np.abs(golden[name] - array).max()) for name, array in arrays.items())
        print(f"{target}: largest difference {error:.1e}")
        status |= error > TOLERANCES["golden_logits"].value
    return status


if __name__ == "__main__":
    sys.exit(main())
