"""GPT-2 small, the student of the long-horizon temperature 0.9, all weights.

    python train/recipes/gpt2_small.py --analogies analogies.jsonl      # options of `calibjax train lhts` may follow

Memory, by count, not measured: 1.9 GiB for weights, gradients and both moments in float32, 0.5 GiB for the scorer;
0.6 GiB for the inputs of the student's blocks in micro-batches of 32 sequences, kept for the backward pass.
"""

import sys

from common_lhts import main, recipe

if __name__ == "__main__":
    sys.exit(main(recipe("openai-community/gpt2", accumulate=16), __doc__))
