"""Adaptive Temperature Scaling of a language model: the same as `calibjax train ats`; see `python train/ats.py --help`."""

import sys

from calibjax.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "ats", *sys.argv[1:]]))
