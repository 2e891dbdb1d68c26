"""The command `calibjax`, also as `python -m calibjax`: Ctrl-C is handled before anything else is imported."""

import os
import signal
import sys


def main(args: list[str] | None = None) -> int:
    """Runs `calibjax.cli.main`; Ctrl-C while that module is imported ends with exit code 130 and one line."""
    signal.signal(signal.SIGINT, _stop)
    from calibjax import cli
    from calibjax.runtime.platforms import keep_compiled_programs, leave_out_torch

    keep_compiled_programs()
    leave_out_torch()
    return cli.main(args)


def _stop(number: int, frame: object) -> None:
    os.write(2, b"\nstopped by Ctrl-C\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
