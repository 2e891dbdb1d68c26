"""Long Horizon Temperature Scaling of a language model: `python train/lhts.py ...` is `calibjax train lhts ...`."""

import sys

from calibjax.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", "lhts", *sys.argv[1:]]))
