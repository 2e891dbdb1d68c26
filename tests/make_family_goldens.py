"""Writes tests/goldens/<family>.npz, and prints the table of docs/models.md. Needs PyTorch.

    python tests/make_family_goldens.py [FAMILY ...]

A golden file holds a small configuration, its tensors' names and shapes (the weights follow from the names), tokens,
and the hidden states and logits of transformers in float32. The table sets every small configuration of tests/parity.py
beside transformers, in float32 and bfloat16, as the tests do.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from parity import GOLDENS, VARIANTS, torch_errors


def measure(family, name, golden):
    """Errors of one configuration: float32 of hidden states and of logits, bfloat16 of ours and of PyTorch's."""
    with tempfile.TemporaryDirectory() as folder:
        errors, arrays = torch_errors(Path(folder), family, name, half=True)
    if golden:
        np.savez_compressed(GOLDENS / f"{family}.npz", **arrays)
    return tuple(errors.values())


def main():
    print("| family | configurations | float32: hidden states | logits | bfloat16: ours | PyTorch's |")
    print("|---|---|---|---|---|---|")
    for family in sys.argv[1:] or VARIANTS:
        variants = VARIANTS[family]
        rows = [measure(family, name, golden=not number) for number, name in enumerate(variants)]
        hidden, logits, half, rough = np.max(rows, axis=0)
        print(
            f"| {family} | {', '.join(variants)} | {hidden:.1e} | {logits:.1e} | {half:.1e} | {rough:.1e} |", flush=True
        )


if __name__ == "__main__":
    main()
