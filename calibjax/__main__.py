"""The command `calibjax`, also as `python -m calibjax`.

Ctrl-C and SIGTERM have their exit codes before anything else is imported.
"""

import os
import signal
import sys


def main(args: list[str] | None = None) -> int:
    """Runs `calibjax.cli.main`; a signal before it ends with exit code 130 or 143 and one line.

    After the command has ended, SIGTERM is ignored: all is written, and a signal in clean-up would make the code -15.
    """
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    from calibjax import cli
    from calibjax.runtime.platforms import keep_compiled_programs, leave_out_torch

    keep_compiled_programs()
    leave_out_torch()
    try:
        return cli.main(args)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stop(number: int, frame: object) -> None:
    os.write(2, b"\nstopped by SIGTERM\n" if number == signal.SIGTERM else b"\nstopped by Ctrl-C\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
