"""Chat templates, rendered in a process with limited time and memory.

A chat template is a program from the model's directory. The sandbox of transformers keeps it from reading files, but
not from looping or from allocating memory without end.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calibjax.data import template_process
from calibjax.runtime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Returns `tokenizer.apply_chat_template(messages, tokenize=False, **options)`.

    Messages, at least one, and options are JSON values, none of them null.

    Raises:
        UserError: the template raises an error, or takes more than `template_process.SECONDS` or `MEMORY` bytes.
    """
    try:
        template = tokenizer.get_chat_template(tools=options.get("tools"))
    except ValueError as error:
        raise UserError(f"the tokenizer has no usable chat template: {error}") from error
    request = {**tokenizer.special_tokens_map, **options, "conversations": [list(messages)], "chat_template": template}
    answer = _renderer.answer(json.dumps([template_process.SECONDS, request]) + "\n")
    if not answer:
        raise UserError(
            f"the tokenizer's chat template was stopped: it took more than {template_process.SECONDS} s or "
            f"{template_process.MEMORY / 2**30:g} GiB. Correct chat_template in the model's tokenizer_config.json or "
            "chat_template.jinja."
        )
    if "error" in answer:
        raise UserError(f"the tokenizer's chat template rejects the conversation: {answer['error']}")
    return answer["text"]


class _Renderer:
    """The process, which is started with the first request and again after one that ended it."""

    def __init__(self) -> None:
        self._process: Any = None
        self._lock = threading.Lock()

    def answer(self, line: str) -> dict[str, str]:
        """The answer of the process to a line; empty if it ended instead."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", template_process.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
                if not self._process.stdout.readline():
                    raise RuntimeError(f"{template_process.__file__}: cannot be started.")
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
