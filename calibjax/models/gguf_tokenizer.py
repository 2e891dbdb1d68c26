"""Tokenizers of GGUF files: built with `tokenizers` from the vocabulary that the file holds."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibjax.models.gguf import GgufFile, Strings, read_gguf
from calibjax.runtime.errors import UserError
from calibjax.runtime.platforms import torch_left_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "mpt", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (_DIGITS, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
"""Expressions that split text before merges, one after another, by `tokenizer.ggml.pre` of byte-level vocabularies."""
_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""Those that begin a text with its first token where the file does not say so."""
_CONTROL, _USER_DEFINED = 3, 4
_PREFIX = "tokenizer.ggml."


def gguf_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    """Returns the tokenizer of a GGUF file, with its special tokens and chat template.

    Raises:
        UserError: if its kind or the way it splits text is not supported, or its vocabulary is not valid.
    """
    with torch_left_out():
        from transformers import PreTrainedTokenizerFast
    from tokenizers import AddedToken, Tokenizer, processors

    file = read_gguf(path)
    kind = file.get(f"{_PREFIX}model", str)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UserError(f"{path}: {_PREFIX}model = {kind!r} is not supported; expected {' or '.join(builders)}.")
    tokens = _array(file, "tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer: Tokenizer = builders[kind](file, tokens, vocabulary)
    kinds = _array(file, "token_type", len(tokens)) if f"{_PREFIX}token_type" in file.metadata else ()
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)
    special = {}
    for name in ("bos", "eos", "unknown", "padding"):
        number = file.get(f"{_PREFIX}{name}_token_id", int)
        if number is not None:
            if not 0 <= number < len(tokens):
                raise UserError(f"{path}: {_PREFIX}{name}_token_id = {number}; expected less than {len(tokens):,}.")
            special[f"{ {'unknown': 'unk', 'padding': 'pad'}.get(name, name) }_token"] = tokens[number]
    with_bos = kind == "llama" or file.metadata.get(f"{_PREFIX}pre") in _WITH_BOS
    begins = file.get(f"{_PREFIX}add_bos_token", bool, with_bos) and "bos_token" in special
    ends = file.get(f"{_PREFIX}add_eos_token", bool, False) and "eos_token" in special
    around = [special["bos_token"]] if begins else [], [special["eos_token"]] if ends else []
    if any(around):
        tokenizer.post_processor = processors.Sequence(
            [
                tokenizer.post_processor or processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=[*around[0], "$A", *around[1]],
                    special_tokens=[(token, vocabulary[token]) for token in itertools.chain(*around)],
                ),
            ]
        )
    template = file.get("tokenizer.chat_template", str)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


def gguf_stop_tokens(path: Path) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a text, a turn or a message."""
    file = read_gguf(path)
    numbers = (file.get(f"{_PREFIX}{name}_token_id", int) for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(number for number in numbers if number is not None))


def _array(file: GgufFile, name: str, count: int | None = None) -> list[Any]:
    """The values of an array of metadata; raises `UserError` unless there are `count`."""
    value = file.metadata.get(f"{_PREFIX}{name}")
    try:
        values = value.read() if isinstance(value, Strings) else value.tolist()  # pyright: ignore
    except (AttributeError, ValueError) as error:
        raise UserError(f"{file.path}: {_PREFIX}{name}: expected an array ({error}).") from error
    if count is not None and len(values) != count:
        raise UserError(f"{file.path}: {_PREFIX}{name}: expected {count:,} values, got {len(values):,}.")
    return values


def _byte_level(file: GgufFile, tokens: list[str], vocabulary: dict[str, int]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    name = file.get(f"{_PREFIX}pre", str)
    if name not in _SPLITS:
        raise UserError(
            f"{file.path}: {_PREFIX}pre = {name!r}: how this tokenizer splits text is not known here; known: "
            f"{', '.join(sorted(_SPLITS))}. Convert the model's original files instead."
        )
    merges = [tuple(merge.split(" ")) for merge in _array(file, "merges")]
    if not all(len(pair) == 2 for pair in merges):
        raise UserError(f"{file.path}: {_PREFIX}merges: expected pairs of tokens.")
    tokenizer = Tokenizer(_bpe(file, models.BPE, vocabulary, merges, fuse_unk=False))
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

    scores = _array(file, "scores", len(tokens))
    merges = []
    for number in sorted(range(len(tokens)), key=lambda number: (-scores[number], number)):
        token = tokens[number]
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    unknown = file.get(f"{_PREFIX}unknown_token_id", int, 0)
    if not 0 <= unknown < len(tokens):
        raise UserError(f"{file.path}: {_PREFIX}unknown_token_id = {unknown}; expected less than {len(tokens):,}.")
    options = {"unk_token": tokens[unknown], "byte_fallback": True}
    tokenizer = Tokenizer(_bpe(file, models.BPE, vocabulary, merges, fuse_unk=True, **options))
    prefixed = file.get(f"{_PREFIX}add_space_prefix", bool, True)
    steps = [normalizers.Prepend("\u2581")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    last = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return tokenizer


def _bpe(file: GgufFile, bpe: Any, vocabulary: dict[str, int], merges: list[Any], **options: Any) -> Any:
    try:
        return bpe(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the tokenizers package raises bare Exception
        raise UserError(f"{file.path}: its tokenizer cannot be built: {str(error)[:200]}.") from error
