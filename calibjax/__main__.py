"""`python -m calibjax` is the command `calibjax`."""

import sys

from calibjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
