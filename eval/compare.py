"""Comparison of recalibration methods: `python eval/compare.py ...` is `calibjax compare ...`."""

import sys

from calibjax.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
