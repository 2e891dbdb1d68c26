"""The tokenizer of a model: of its directory, which transformers reads when it is first used, or of its GGUF file."""

import functools
import logging
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibjax.models.config import DecoderConfig
from calibjax.models.families import FAMILIES
from calibjax.models.gguf import GgufFile, is_gguf, read_gguf
from calibjax.runtime.errors import UserError, first_line
from calibjax.runtime.files import read_json
from calibjax.runtime.platforms import torch_left_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_log = logging.getLogger(__name__)
_CHAT_TEMPLATE = "chat_template.json"
"""File of multimodal models, which transformers reads with their processors only."""
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def find_tokenizer(folder: Path, config: DecoderConfig) -> "Callable[[], PreTrainedTokenizerBase] | None":
    """A function that reads the tokenizer of a model's directory or GGUF file once; None if there is none.

    The tokenizer.json, or else the other files, are checked at once: `UserError` if unreadable or not of this model.
    """
    if is_gguf(folder):
        tokens = read_gguf(folder).metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            return None
        if len(tokens) > config.vocab_size:
            rows = f"token_embd.weight has only {config.vocab_size:,} rows"
            raise UserError(f"{folder}: tokenizer.ggml.tokens: {len(tokens):,} tokens, but {rows}.")
        return functools.cache(lambda: gguf_tokenizer(folder))
    # If transformers has no tokenizer class for the family, the class that the files name is remote code.
    needed = _FILES if FAMILIES[config.family].native else _FILES[:1]
    if not any((folder / name).is_file() for name in needed):
        return None
    get_tokenizer = functools.cache(lambda: _read(folder, config))
    if not (folder / _FILES[0]).is_file():
        get_tokenizer()
        return get_tokenizer
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / _FILES[0]))
    except Exception as error:
        raise UserError(f"{folder}: transformers cannot read the tokenizer files: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    check_tokenizer(tokenizer, config, added)
    if beyond := sorted(index for index in added if index >= config.vocab_size):
        tokens = f"{len(beyond)} added tokens of the tokenizer"
        first = f"from {added[beyond[0]].content!r} ({beyond[0]}) on: a text that holds one is refused"
        _log.warning(f"{folder}: {tokens} are beyond the model's vocabulary of {config.vocab_size}, {first}.")
    return get_tokenizer


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
        raise UserError(f"{folder}: transformers cannot read the tokenizer files: {error}") from error
    check_tokenizer(tokenizer, config, tokenizer.added_tokens_decoder)
    return tokenizer


def check_tokenizer(tokenizer: Any, config: DecoderConfig, added: Container[int]) -> None:
    """Raises `UserError` if the tokenizer has an id beyond the model's vocabulary that is not of an added token."""
    ids = (item for item in tokenizer.get_vocab().items() if item[1] not in added)
    token, largest = max(ids, key=lambda item: item[1], default=("", -1))
    if largest >= config.vocab_size:
        problem = f"largest id is {largest} ({token!r}), but the model has vocab_size {config.vocab_size}"
        raise UserError(f"The tokenizer's {problem}: it belongs to another model.")


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = r"\p{N}"
_SPLITS = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "mpt", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (_DIGITS, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
"""Expressions that split text before merges, one after another, by `tokenizer.ggml.pre` of byte-level vocabularies."""
_LIKE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""Splits whose vocabularies take a whole piece that is a token without merges, and by default begin with a BOS."""
_CONTROL, _USER_DEFINED = 3, 4


def gguf_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a GGUF file, with its special tokens and chat template.

    Raises:
        UserError: if its kind or the way it splits text is not supported, or its vocabulary is not valid.
    """
    with torch_left_out():
        from transformers import PreTrainedTokenizerFast
    from tokenizers import AddedToken, Tokenizer, processors

    file = read_gguf(path)
    kind = file.get("tokenizer.ggml.model", str)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UserError(f"{path}: tokenizer.ggml.model = {kind!r} is not supported; expected {' or '.join(builders)}.")
    tokens = _array(file, "tokens", str)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer: Tokenizer = builders[kind](file, tokens, vocabulary)
    kinds = _array(file, "token_type", int, len(tokens)) if "tokenizer.ggml.token_type" in file.metadata else ()
    # All others of Phi-3 take the white space after them, which no key of the file says.
    is_phi3 = kind == "llama" and file.metadata["general.architecture"] == "phi3"
    plain = ("<unk>", "<s>", "<|endoftext|>") if is_phi3 else vocabulary
    added = []
    for token, token_kind in zip(tokens, kinds, strict=False):
        if token_kind in (_CONTROL, _USER_DEFINED) and token:
            is_control = token_kind == _CONTROL
            added.append(AddedToken(token, normalized=False, special=is_control, rstrip=token not in plain))
    tokenizer.add_tokens(added)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {ours: token for ours, name in names.items() if (token := _special(file, tokens, name)) is not None}
    has_bos = kind == "llama" or file.metadata.get("tokenizer.ggml.pre") in _LIKE_LLAMA3
    adds_bos = file.get("tokenizer.ggml.add_bos_token", bool, has_bos) and "bos_token" in special
    adds_eos = file.get("tokenizer.ggml.add_eos_token", bool, False) and "eos_token" in special
    first = [special["bos_token"]] if adds_bos else []
    last = [special["eos_token"]] if adds_eos else []
    if first or last:
        level = tokenizer.post_processor or processors.ByteLevel(trim_offsets=False)
        ids = [(token, vocabulary[token]) for token in (*first, *last)]
        around = processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=ids)
        tokenizer.post_processor = processors.Sequence([level, around])
    template = file.get("tokenizer.chat_template", str)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


def gguf_stop_tokens(path: Path) -> tuple[int, ...]:
    """The ids of the tokens that end a text, a turn or a message."""
    file = read_gguf(path)
    numbers = (file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(number for number in numbers if number is not None))


def _special(file: GgufFile, tokens: list[str], name: str, default: int | None = None) -> str | None:
    number = file.get(f"tokenizer.ggml.{name}_token_id", int, default)
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise UserError(f"{file.path}: tokenizer.ggml.{name}_token_id = {number}; expected less than {len(tokens):,}.")
    return tokens[number]


def _array(file: GgufFile, name: str, kind: type, count: int | None = None) -> list[Any]:
    """The values of an array of metadata; raises `UserError` unless they are of this kind, and there are `count`."""
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    values = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(values, list) or type(next(iter(values), kind())) is not kind:
        raise UserError(f"{file.path}: tokenizer.ggml.{name}: expected an array of {kind.__name__}.")
    if count is not None and len(values) != count:
        raise UserError(f"{file.path}: tokenizer.ggml.{name}: expected {count:,} values, got {len(values):,}.")
    return values


def _byte_level(file: GgufFile, tokens: list[str], vocabulary: dict[str, int]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    name = file.get("tokenizer.ggml.pre", str)
    if name not in _SPLITS:
        hint = f"known: {', '.join(sorted(_SPLITS))}. Convert the model's original files instead"
        problem = f"tokenizer.ggml.pre = {name!r}: how this tokenizer splits text is not known here"
        raise UserError(f"{file.path}: {problem}; {hint}.")
    merges = [tuple(merge.split(" ")) for merge in _array(file, "merges", str)]
    if not all(len(pair) == 2 for pair in merges):
        raise UserError(f"{file.path}: tokenizer.ggml.merges: expected pairs of tokens.")
    like_llama3 = name in _LIKE_LLAMA3
    tokenizer = Tokenizer(_bpe(file, models.BPE, vocabulary, merges, fuse_unk=False, ignore_merges=like_llama3))
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in _SPLITS[name]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str], vocabulary: dict[str, int]) -> Any:
    """Pairs are merged in the order of the scores of what they give, as SentencePiece does."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _array(file, "scores", float, len(tokens))
    merges = []
    for _, token in sorted(zip(scores, tokens, strict=True), key=lambda scored: -scored[0]):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
        merges += sorted(known, key=lambda pair: [vocabulary[part] for part in pair])
    unk = _special(file, tokens, "unknown", 0)
    tokenizer = Tokenizer(_bpe(file, models.BPE, vocabulary, merges, fuse_unk=True, unk_token=unk, byte_fallback=True))
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps = [normalizers.Prepend("\u2581")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    last = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return tokenizer


def _bpe(file: GgufFile, bpe: Any, vocabulary: dict[str, int], merges: list[Any], **options: Any) -> Any:
    try:
        return bpe(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the tokenizers package raises bare Exception
        raise UserError(f"{file.path}: its tokenizer cannot be built: {first_line(error)}.") from error
