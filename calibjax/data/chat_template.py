"""Chat templates, rendered in a process with limited time and memory.

A chat template is a program from the model's directory. The sandbox of transformers keeps it from reading files, but
not from looping or from allocating memory without end. The process runs this file as a script, so that it starts
without jax: the module itself imports nothing of calibjax.
"""

import faulthandler
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any

SECONDS = 10  # of one rendering
MEMORY = 2**30  # bytes that the process may allocate for rendering, where the operating system limits them
LONGEST = 2**26  # characters of a text


def render_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The text of `tokenizer.apply_chat_template(messages, tokenize=False, **options)`; see `render_chats`."""
    return render_chats(tokenizer, [messages], **options)[0]


def render_chats(tokenizer: Tokenizer, chats: Sequence[Sequence[Mapping[str, Any]]], **options: Any) -> list[str]:
    """Renders several conversations at once.

    Messages, at least one of each conversation, and options are JSON values, none of them null. Raises `UserError`
    where the template raises an error, or takes more than `SECONDS` or `MEMORY` bytes.
    """
    from calibjax.runtime.errors import UserError

    try:
        template = tokenizer.get_chat_template(tools=options.get("tools"))
    except ValueError as error:
        raise UserError(f"the tokenizer has no usable chat template: {error}") from error
    request = {**tokenizer.special_tokens_map, **options, "conversations": list(chats), "chat_template": template}
    answer = _renderer.answer(json.dumps([SECONDS, request], default=str) + "\n")  # times and decimals of Parquet
    if not answer:
        limits = f"{SECONDS} s or {MEMORY / 2**30:g} GiB"
        hint = "Correct chat_template in the model's tokenizer_config.json or chat_template.jinja."
        raise UserError(f"the tokenizer's chat template was stopped: it took more than {limits}. {hint}")
    if "error" in answer:
        raise UserError(f"the tokenizer's chat template rejects the conversation: {answer['error']}")
    return answer["texts"]


class _Renderer:
    """The process, which is started with the first request and again after one that ended it."""

    def __init__(self) -> None:
        self._process: Any = None
        self._lock = threading.Lock()

    def answer(self, line: str) -> dict[str, Any]:
        """The answer of the process to a line; empty if it ended instead."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
                if not self._process.stdout.readline():
                    raise RuntimeError(f"{__file__}: cannot be started.")
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if answer:
                return json.loads(answer)
            with self._process as process:
                process.kill()
            self._process = None
            return {}


_renderer = _Renderer()


def _main() -> None:
    """The process: writes a line when it is ready, and then one answer per line of standard input."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    print("{}", flush=True)
    for line in sys.stdin:
        seconds, request = json.loads(line)
        # Ends the process from another thread, so that a loop inside a built-in function is stopped as well.
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            texts, _ = render_jinja_template(**request)
            if (length := sum(map(len, texts))) > LONGEST:
                raise ValueError(f"the text has {length:,} characters, more than {LONGEST:,}")
            answer = {"texts": texts}
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
    _main()
