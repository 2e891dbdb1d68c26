"""GPT-2 medium, the student of the long-horizon temperature 0.9, all weights.

    python train/recipes/gpt2_medium.py --analogies analogies.jsonl      # options of `calibjax train lhts` may follow

Memory, by count, not measured: 5.3 GiB for weights, gradients and both moments in float32, 1.3 GiB for the scorer;
0.7 GiB for the inputs of the student's blocks in micro-batches of 16 sequences, kept for the backward pass.
"""

import sys

from common_lhts import main, recipe

if __name__ == "__main__":
    sys.exit(main(recipe("openai-community/gpt2-medium", accumulate=32), __doc__))
