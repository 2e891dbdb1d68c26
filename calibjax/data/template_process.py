"""Process that renders chat templates: `chat_template.render_chat` runs this file as a script.

It imports nothing of calibjax, so that it starts without jax.
"""

import faulthandler
import json
import sys
from pathlib import Path

SECONDS = 10  # of one rendering, which every request carries
MEMORY = 2**30  # bytes that the process may allocate for rendering, where the operating system limits them
LONGEST = 2**26  # characters of a text


def main() -> None:
    """Writes a line when it is ready, and then one answer per line of standard input."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    print("{}", flush=True)
    for line in sys.stdin:
        seconds, request = json.loads(line)
        # Ends the process from a thread of its own, so that it also stops a loop inside a built-in function.
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            texts, _ = render_jinja_template(**request)
            if len(texts[0]) > LONGEST:
                raise ValueError(f"the text has {len(texts[0]):,} characters, more than {LONGEST:,}")
            answer = {"text": texts[0]}
        except BaseException as error:  # MemoryError and RecursionError among them
            answer = {"error": str(error)[:500] or type(error).__name__}
        print(json.dumps(answer), flush=True)
        faulthandler.cancel_dump_traceback_later()


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    statistics = Path("/proc/self/statm")
    used = int(statistics.read_text().split()[0]) * resource.getpagesize() if statistics.exists() else 4 * MEMORY
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + MEMORY if hard == resource.RLIM_INFINITY else min(used + MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main()
