"""The command that this process runs, for the page that its results leave."""

import contextvars

command_line: contextvars.ContextVar[str] = contextvars.ContextVar("command_line", default="")
"""As typed; "" where the code was not called from a command line."""
