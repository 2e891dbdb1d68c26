"""GPT-2 large, the student of the long-horizon temperature 0.9, all weights.

    python train/recipes/gpt2_large.py --analogies analogies.jsonl      # options of `calibjax train lhts` may follow

Memory, by count, not measured: 11.5 GiB for weights, gradients and both moments in float32, 2.9 GiB for the scorer;
0.7 GiB for the inputs of the student's blocks in micro-batches of 8 sequences, kept for the backward pass.
"""

import sys

from common_lhts import main, recipe

if __name__ == "__main__":
    sys.exit(main(recipe("openai-community/gpt2-large", accumulate=64), __doc__))
