"""Accuracy and calibration on benchmarks: `python eval/tasks.py ...` is `calibjax eval tasks ...`."""

import sys

from calibjax.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["eval", "tasks", *sys.argv[1:]]))
