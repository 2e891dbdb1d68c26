"""Gemma-2-2B, all weights, with label smoothing 0.1.

    python train/recipes/gemma2_2b.py tulu3 --out runs/gemma-tulu3      # or alpaca, openhermes

Hardware: 8 GPUs of 40 GB, or a TPU slice with as much memory; batches of 128 sequences as 16 micro-batches.
Memory: 39.0 GiB for weights, gradients and both moments in float32, 4.9 GiB on each of 8 devices; there also 0.46 GiB
for the inputs of the blocks, kept for the backward pass, and no logits (a sequence's would take 3.91 GiB).
"""

import sys

from common import main, recipe

if __name__ == "__main__":
    sys.exit(main(lambda data: recipe("google/gemma-2-2b", data, accumulate=16), __doc__))
