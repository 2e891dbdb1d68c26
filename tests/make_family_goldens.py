"""Writes tests/goldens/<family>.npz, and prints the table of docs/models.md. Needs PyTorch.

    python tests/make_family_goldens.py [FAMILY ...]

A golden file holds a small configuration, its tensors' names and shapes (the weights follow from the names), tokens,
and the hidden states and logits of transformers in float32. The table sets every small configuration of tests/parity.py
beside transformers, in float32 and bfloat16, as the tests do.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from parity import (
    GOLDENS,
    VARIANTS,
    largest_error,
    mean_error,
    our_run,
    random_tokens,
    settings_of,
    torch_model,
    torch_run,
    write_files,
)

from calibjax.models import load_model


def measure(family, name, golden):
    """Errors of one configuration: float32 of hidden states and of logits, bfloat16 of ours and of PyTorch's."""
    settings = settings_of(family, name)
    with tempfile.TemporaryDirectory() as folder:
        theirs, shapes = torch_model(Path(folder), settings)
        if family == "qwen":
            write_files(Path(folder), family, settings, shapes)
        tokens = random_tokens(settings)
        expected = torch_run(theirs, tokens)
        if golden:
            GOLDENS.mkdir(exist_ok=True)
            np.savez_compressed(
                GOLDENS / f"{family}.npz",
                settings=json.dumps(settings),
                shapes=json.dumps(shapes),
                version=transformers.__version__,
                tokens=tokens,
                hidden=np.stack(expected[:-1]),
                logits=expected[-1],
            )
        got = our_run(load_model(folder), tokens)
        exact = largest_error(got[:-1], expected[:-1]), largest_error(got[-1:], expected[-1:])
        tokens = random_tokens(settings, rows=64)
        expected = torch_run(theirs, tokens)
        half = our_run(load_model(folder, jnp.bfloat16), tokens)
        rough = torch_run(theirs.to(torch.bfloat16), tokens)
    return *exact, mean_error(half, expected), mean_error(rough, expected)


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
