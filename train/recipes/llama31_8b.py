"""Llama-3.1-8B, all weights, with label smoothing 0.1.

    python train/recipes/llama31_8b.py tulu3 --out runs/llama-tulu3      # or alpaca, openhermes

Hardware: 8 GPUs of 80 GB, or a TPU slice with as much memory; batches of 128 sequences as 16 micro-batches.
Memory: 119.7 GiB for weights, gradients and both moments in float32, 15.0 GiB on each of 8 devices; there also 1.0 GiB
for the inputs of the blocks, kept for the backward pass, and no logits (a sequence's would take 1.96 GiB).
"""

import sys

from common import main, recipe

if __name__ == "__main__":
    sys.exit(main(lambda data: recipe("meta-llama/Llama-3.1-8B", data, accumulate=16), __doc__))
