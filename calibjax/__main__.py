"""The command `calibjax`, also as `python -m calibjax`."""

import os
import signal
import sys


def main(args: list[str] | None = None) -> int:
    """Runs `calibjax.cli.main`; a signal before it ends with exit code 130 or 143 and one line.

    After the command has ended, all is written: SIGTERM is ignored, and Ctrl-C cuts the clean-up short, without a line
    and with the command's exit code, or 130 where that is an exception.
    """
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    from calibjax import cli
    from calibjax.runtime.platforms import keep_compiled_programs, leave_out_torch

    keep_compiled_programs()
    leave_out_torch()
    code = 128 + signal.SIGINT
    try:
        code = cli.main(args)
        return code
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(code))


def _stop(number: int, frame: object) -> None:
    os.write(2, b"\nstopped by SIGTERM\n" if number == signal.SIGTERM else b"\nstopped by Ctrl-C\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
