"""The tokenizer of a model's directory, which transformers reads when it is first used."""

import functools
import logging
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibjax.models.config import DecoderConfig
from calibjax.models.families import FAMILIES
from calibjax.models.gguf import Strings, is_gguf, read_gguf
from calibjax.models.gguf_tokenizer import gguf_tokenizer
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json
from calibjax.runtime.platforms import torch_left_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_CHAT_TEMPLATE = "chat_template.json"
"""File of multimodal models, which transformers reads with their processors only."""
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def find_tokenizer(folder: Path, config: DecoderConfig) -> "Callable[[], PreTrainedTokenizerBase] | None":
    """Returns a function that reads the tokenizer of a model's directory or GGUF file once; None if there is none.

    A tokenizer.json is read and checked at once.

    Raises:
        UserError: by `check_tokenizer`, or tokenizer.json or, without one, the other files cannot be read. The function
            raises it where transformers cannot read the files.
    """
    if is_gguf(folder):
        tokens = read_gguf(folder).metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, Strings):
            return None
        if tokens.count > config.vocab_size:
            raise UserError(
                f"{folder}: tokenizer.ggml.tokens: {tokens.count:,} tokens, but token_embd.weight has only "
                f"{config.vocab_size:,} rows."
            )
        return functools.cache(lambda: gguf_tokenizer(folder))
    # If transformers has no tokenizer class for the family, the class that the files name is remote code.
    if not any((folder / name).is_file() for name in (_FILES if FAMILIES[config.family].native else _FILES[:1])):
        return None
    read = functools.cache(lambda: _read(folder, config))
    if not (folder / _FILES[0]).is_file():
        read()
        return read
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / _FILES[0]))
    except Exception as error:
        raise _unreadable(folder, error) from error
    added = tokenizer.get_added_tokens_decoder()
    check_tokenizer(tokenizer, config, added)
    if beyond := sorted(index for index in added if index >= config.vocab_size):
        first = added[beyond[0]].content
        _log.warning(
            f"{folder}: {len(beyond)} added tokens of the tokenizer are beyond the model's vocabulary of "
            f"{config.vocab_size}, from {first!r} ({beyond[0]}) on: a text that holds one is refused."
        )
    return read


def _read(folder: Path, config: DecoderConfig) -> "PreTrainedTokenizerBase":
    with torch_left_out():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if FAMILIES[config.family].native:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        tokenizer("a", verbose=False)  # some settings are read only now
        if not tokenizer.chat_template and (folder / _CHAT_TEMPLATE).is_file():
            tokenizer.chat_template = read_json(folder / _CHAT_TEMPLATE)["chat_template"]
    except Exception as error:  # the tokenizers package raises bare Exception for damaged files
        raise _unreadable(folder, error) from error
    check_tokenizer(tokenizer, config, tokenizer.added_tokens_decoder)
    return tokenizer


def check_tokenizer(tokenizer: Any, config: DecoderConfig, added: Container[int]) -> None:
    """Raises `UserError` if the tokenizer has an id beyond the model's vocabulary that is not of an added token."""
    ids = (item for item in tokenizer.get_vocab().items() if item[1] not in added)
    token, largest = max(ids, key=lambda item: item[1], default=("", -1))
    if largest >= config.vocab_size:
        raise UserError(
            f"The tokenizer's largest id is {largest} ({token!r}), but the model has vocab_size {config.vocab_size}: "
            "it belongs to another model."
        )


def _unreadable(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder}: transformers cannot read the tokenizer files: {error}")
