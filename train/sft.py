"""Label-smoothed fine-tuning of a language model: `python train/sft.py ...` is `calibjax train sft ...`."""

import sys

from calibjax.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", "sft", *sys.argv[1:]]))
