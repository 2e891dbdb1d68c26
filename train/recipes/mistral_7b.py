"""Mistral-7B, all weights, with label smoothing 0.1.

    python train/recipes/mistral_7b.py tulu3 --out runs/mistral-tulu3      # or alpaca, openhermes

Hardware: 8 GPUs of 80 GB, or a TPU slice with as much memory; batches of 128 sequences as 16 micro-batches.
Memory: 107.9 GiB for weights, gradients and both moments in float32, 13.5 GiB on each of 8 devices; there also 1.0 GiB
for the inputs of the blocks, kept for the backward pass, and no logits (a sequence's would take 0.49 GiB).
"""

import sys

from common import main, recipe

if __name__ == "__main__":
    sys.exit(main(lambda data: recipe("mistralai/Mistral-7B-v0.1", data, accumulate=16), __doc__))
