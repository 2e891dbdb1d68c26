"""Calibration of every layer: `python eval/layers.py ...` is `calibjax eval layers ...`."""

import sys

from calibjax.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["eval", "layers", *sys.argv[1:]]))
