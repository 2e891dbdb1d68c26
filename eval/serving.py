"""Milliseconds per decoded token with and without a head, in JAX and in PyTorch, measured in turns in one process.

python eval/serving.py MODEL EXPORT      # EXPORT: of `calibjax export`
"""

import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import calibjax
import calibjax.torch

ROWS, NEW, REPEATS = 4, 32, 5


def in_turns(plain, with_head) -> tuple[float, float]:
    """Medians of both in milliseconds per step; both run once before."""
    times = ([], [])
    for _ in range(REPEATS + 1):
        for found, run in zip(times, (plain, with_head), strict=True):
            before = time.perf_counter()
            run()
            found.append((time.perf_counter() - before) * 1000 / NEW)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def main(model: str, export: str) -> None:
    lm = calibjax.load_model(model)
    head = calibjax.load_head(export, lm)
    prompts = [[1, 5, 9, 2 + row] for row in range(ROWS)]

    def generate(**options):
        return lambda: np.asarray(calibjax.generate(lm, prompts, max_new_tokens=NEW, stop_tokens=(), **options).tokens)

    theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = torch.tensor(prompts)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}

    def attached():
        with_head = calibjax.torch.attach(theirs, export, check=False)
        theirs.generate(tokens, **options)
        with_head.detach()

    found = {
        "JAX": in_turns(generate(), generate(head=head)),
        "PyTorch": in_turns(lambda: theirs.generate(tokens, **options), attached),
    }
    print(f"{lm!r}, {head!r}: {ROWS} sequences, {NEW} tokens each, float32, {torch.get_num_threads()} threads")
    for name, (plain, calibrated) in found.items():
        print(f"| {name} | {plain:.2f} | {calibrated:.2f} | {calibrated / plain - 1:+.0%} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
