"""Adaptive Temperature Scaling of a language model: `python train/ats.py ...` is `calibjax train ats ...`."""

import sys

from calibjax.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", "ats", *sys.argv[1:]]))
