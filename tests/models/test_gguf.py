"""GGUF files against transformers and PyTorch: every family and type, real files, memory, tokenizers, hostile files."""

import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from assets import model_path, real_model
from parity import LLAMA3_ROPE, LLAMA_JSON, NO_BOS, UNTIED, our_run, random_tokens, torch_model, torch_run, worst_error
from safetensors.numpy import load_file, save_file

from calibjax.commands import convert
from calibjax.models import load_model
from calibjax.models.generate import default_stop_tokens
from calibjax.models.load import read_config
from calibjax.nn.blocks import Rope
from calibjax.runtime.errors import UserError

gguf = pytest.importorskip("gguf")

from gguf_files import KINDS, finish, write_gguf  # noqa: E402

SMALL = LLAMA_JSON | {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
GEMMA = SMALL | {"head_dim": 32, "rms_norm_eps": 1e-6, "num_hidden_layers": 7, "sliding_window": 5}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.1, 1.7, 2.0, 2.5], "long_factor": [2.0, 9.0, 9.0, 9.0]}
MODELS = {
    "llama": SMALL | {"num_key_value_heads": 2},
    "llama-untied-biases-linear": SMALL
    | {"attention_bias": True, "mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 3.0}, **UNTIED},
    "mistral": SMALL | {"head_dim": 32, "sliding_window": None},
    "mixtral": SMALL | EXPERTS | {"sliding_window": None},
    "qwen2": SMALL | UNTIED,
    "qwen2-yarn": SMALL
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}
    | {"max_position_embeddings": 512},
    "qwen3": SMALL | {"head_dim": 32},
    "qwen3_moe": SMALL | EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
    "olmoe": SMALL | EXPERTS | {"num_key_value_heads": 4, "intermediate_size": 32, "clip_qkv": 0.6, **NO_BOS, **UNTIED},
    "gemma": GEMMA | {"num_hidden_layers": 2},
    "gemma2": GEMMA | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA | {"query_pre_attn_scalar": 32, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "phi3": SMALL | {"sliding_window": 5, **NO_BOS, **UNTIED},
    "phi3-partial-longrope": SMALL
    | {"partial_rotary_factor": 0.5, "max_position_embeddings": 64, "original_max_position_embeddings": 16}
    | {"rope_scaling": LONGROPE, "sliding_window": None, **NO_BOS},
    "gpt2": GPT2,
    "stablelm": SMALL | {"head_dim": None, "partial_rotary_factor": 0.5, "use_qkv_bias": True, **NO_BOS, **UNTIED},
    "stablelm-parallel": SMALL | {"head_dim": None, "use_parallel_residual": True, **NO_BOS},
    "granite": SMALL
    | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.5},
    "olmo2": SMALL | {"num_key_value_heads": 4, **NO_BOS, **UNTIED},
    "olmo3": SMALL | {"num_hidden_layers": 4, "sliding_window": 5, "rope_scaling": None, **NO_BOS},
}


def written(folder, settings, kind="F32", **given):
    """Writes a GGUF file; returns its path, and PyTorch's model of the values in it."""
    import torch
    from transformers import AutoModelForCausalLM

    folder.mkdir(exist_ok=True)
    model, _ = torch_model(folder, settings)
    values = write_gguf(folder / "model.gguf", model.config, load_file(folder / "model.safetensors"), kind, **given)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    return folder / "model.gguf", AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("name", MODELS)
def test_every_family(tmp_path, name):
    pytest.importorskip("torch")
    settings = MODELS[name] | {"model_type": name.split("-")[0]}
    file, theirs = written(tmp_path / "model", settings, "Q8_0")
    tokens = random_tokens(settings)
    lm = load_model(file)
    error = worst_error(our_run(lm, tokens), torch_run(theirs, tokens))
    print(f"{name}: worst relative error {error:.1e}")
    assert error <= 1e-5
    # llama.cpp writes Mistral as a Llama, and the amplitude of longrope rounded to float32.
    if name not in ("mistral", "phi3-partial-longrope"):
        assert lm.config == load_model(file.parent).config


@pytest.mark.parametrize("kind", KINDS)
def test_every_type(tmp_path, kind):
    """The values are those that `gguf` gives; rows of each tensor are a multiple of every block."""
    pytest.importorskip("torch")
    settings = SMALL | {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, **UNTIED}
    file, theirs = written(tmp_path / "model", settings, kind)
    tokens = random_tokens(settings)
    error = worst_error(our_run(load_model(file), tokens), torch_run(theirs, tokens))
    print(f"{kind}: worst relative error {error:.1e}")
    assert error <= 1e-5


def test_divisors_of_rotary_frequencies(tmp_path):
    """Llama 3's: the file holds the quotient of each frequency, and not the numbers that it follows from."""
    torch = pytest.importorskip("torch")
    settings = SMALL | {"rope_scaling": LLAMA3_ROPE, "rope_theta": 50000.0, "max_position_embeddings": 200}
    model, _ = torch_model(tmp_path, settings)
    plain = 1 / 50000.0 ** (torch.arange(0, 16, 2) / 16)
    divisors = plain / model.model.rotary_emb.inv_freq
    assert divisors.max() > 7
    file, theirs = written(tmp_path / "model", settings, divisors=divisors.numpy())
    tokens = np.random.default_rng(0).integers(0, 40, (2, 150))
    lm = load_model(file)
    assert worst_error(our_run(lm, tokens), torch_run(theirs, tokens)) <= 1e-5
    assert lm.config.max_positions == 200


def test_convert_keeps_the_fingerprint(tmp_path):
    """To safetensors and to Orbax, with the tokenizer's files: each is the model in the file."""
    pytest.importorskip("torch")
    file, _ = written(tmp_path / "model", MODELS["llama"], "Q4_0", more=byte_level_tokens)
    expected = load_model(file)
    for form in ("orbax", "safetensors"):
        convert.run(convert.ConvertOptions(model=str(file), out=tmp_path / form, to=form), lambda line: None)
        lm = load_model(tmp_path / form)
        assert (lm.fingerprint, lm.config) == (expected.fingerprint, expected.config)
        assert default_stop_tokens(lm.with_params(lm.params)) == default_stop_tokens(expected) == (1, 2)
        for text in ("a ab 12 <|user|>", "  b\n"):
            assert lm.tokenizer(text)["input_ids"] == expected.tokenizer(text)["input_ids"]
    assert load_model(file, "bfloat16").fingerprint == expected.fingerprint


def test_split_files(tmp_path):
    pytest.importorskip("torch")
    file, _ = written(tmp_path / "model", MODELS["llama"])
    whole = load_model(file)
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama", split_max_tensors=9)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    finish(writer)
    first, second, *_ = sorted(tmp_path.glob("part-*.gguf"))
    assert load_model(first).fingerprint == whole.fingerprint
    with pytest.raises(UserError, match="the first"):
        load_model(second)
    second.unlink()
    with pytest.raises(UserError, match="are missing beside it"):
        load_model(first)


# --- tokenizers ---


def byte_level_tokens(writer, pre="smollm"):
    tokens = ["<|begin|>", "<|end|>", "<|turn|>", "<|user|>", *"ab12", "Ġ", "Ċ", "ab", "Ġa", "ĠĠ", "12"]
    tokens += [f"<unused{n}>" for n in range(40 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 4] + [1] * 10 + [3] * 26)
    writer.add_token_merges(["a b", "Ġ a", "Ġ Ġ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0].content }}!")


TEXTS = (
    *("Once upon a time, there was a little girl.", "  two  spaces\n\nand lines ", "naïve 東京 🙂", "1234 it's", ""),
    "<s>special</s> tokens",
)


def trained(digits):
    """A byte-level tokenizer as transformers' GPT-2 has it; with the digits apart, as SmolLM's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = [pre_tokenizers.Digits(individual_digits=True), level] if digits else [level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*TEXTS, *(f"{n} {n * n}" for n in range(1000, 1100))] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", ["stories260K", "tinystories-656k", "gpt-2", "smollm"])
def test_tokenizers(tmp_path, name):
    """The vocabulary written as llama.cpp does: the same tokens as the original tokenizer gives, and the same text."""
    byte_level = name in ("gpt-2", "smollm")
    original = trained(name == "smollm") if byte_level else load_model(model_path(name)).tokenizer
    described = json.loads(original.backend_tokenizer.to_str())
    vocabulary = sorted(original.get_vocab().items(), key=lambda item: item[1])
    kinds = {token.content: 3 if token.special else 4 for token in original.added_tokens_decoder.values()}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2" if byte_level else "llama")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([kinds.get(token, 6 if token.startswith("<0x") else 1) for token, _ in vocabulary])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]]
    if byte_level:
        writer.add_tokenizer_pre(name)
        writer.add_token_merges(merges)
    else:
        rank = {merge.replace(" ", ""): -float(number) for number, merge in reversed(list(enumerate(merges)))}
        writer.add_token_scores([rank.get(token, -1e9) for token, _ in vocabulary])
    for role in ("bos", "eos", "unk"):
        if (token_id := getattr(original, f"{role}_token_id")) is not None:
            getattr(writer, f"add_{role}_token_id")(token_id)
    writer.add_add_bos_token(bool(original("a")["input_ids"][0] == original.bos_token_id))
    finish(writer)
    from calibjax.models.tokenizer import gguf_tokenizer

    tokenizer = gguf_tokenizer(tmp_path / "model.gguf")
    for text in TEXTS:
        tokens = original(text)["input_ids"]
        assert tokenizer(text)["input_ids"] == tokens, text
        assert tokenizer.decode(tokens) == original.decode(tokens)


@pytest.mark.parametrize(
    ("architecture", "pre", "text", "expected"),
    [
        ("llama", "llama-bpe", "12 ab", [0, 13, 8, 10]),  # `ignore_merges` of llama.cpp and tokenizer.json
        ("llama", "smollm", "12 ab", [0, 6, 7, 8, 10]),
        # `rstrip` of tokenizer.json
        ("phi3", None, "<|user|>\na</s> \na<|endoftext|>\na", [1, 7, 6, 2, 6, 8, 4, 3, 5]),
        ("llama", None, "<|user|>\na", [1, 7, 4, 3, 5]),
    ],
)
def test_what_no_key_of_a_file_says(tmp_path, architecture, pre, text, expected):
    from calibjax.models.tokenizer import gguf_tokenizer

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    if pre is not None:
        byte_level_tokens(writer, pre)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", "a", "\u2581a", "<|user|>", "<|endoftext|>"])
        writer.add_token_scores([0.0] * 9)
        writer.add_token_types([2, 3, 3, 6, 1, 1, 1, 3, 3])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    finish(writer)
    assert gguf_tokenizer(tmp_path / "model.gguf")(text)["input_ids"] == expected


# --- real files ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("gguf/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("gguf/gemma-3-270m-q4_k_m.gguf", "gemma-3-270m"),
    ],
)
def test_real_files(file, folder):
    """Q4_1, Q8_0, Q4_K, Q5_0, Q6_K, as llama.cpp wrote them, against transformers' own dequantised load."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    path = real_model(file)
    lm = load_model(path)
    theirs = AutoModelForCausalLM.from_pretrained(
        *(path.parent,),
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=GgufConfig(dequantize=True),
    )
    tokens = np.random.default_rng(0).integers(0, lm.config.vocab_size, (2, 24))
    error = worst_error(our_run(lm, tokens), torch_run(theirs.eval(), tokens))
    print(f"{path.name}: worst relative error {error:.1e}")
    assert error <= 1e-5
    tokenizer = AutoTokenizer.from_pretrained(real_model(folder))
    for text in TEXTS:
        assert lm.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"], text
    assert lm.tokenizer.chat_template == tokenizer.chat_template


MEMORY = """
import resource, sys
sys.modules["torch"] = None
import calibjax, numpy as np
from calibjax.models.fingerprint import dotted_leaves
warm, file, dtype = sys.argv[1:]
calibjax.load_model(warm, dtype)
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
lm = calibjax.load_model(file, dtype)
# Not ru_maxrss, which begins with the peak of the process that started this one.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) * 1024
held = sum(leaf.nbytes for _, leaf in dotted_leaves(lm.params))
print(held, peak - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory(tmp_path, dtype):
    """At most 1.3 times the weights, without PyTorch, of a file whose header has 262,144 tokens."""
    pytest.importorskip("torch")
    small, _ = written(tmp_path / "model", MODELS["llama"])
    run = [sys.executable, "-c", MEMORY, small, real_model("gguf/gemma-3-270m-q4_k_m.gguf"), dtype]
    result = subprocess.run(run, check=True, capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": ""})
    held, peak = map(int, result.stdout.split()[-2:])
    print(f"{dtype}: {held / 1e6:,.0f} MB held, peak {peak / 1e6:,.0f} MB")
    assert peak <= 1.3 * held


# --- files of strangers ---


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def number(key, value):
    kind, code = {int: (4, "I"), float: (6, "f"), bool: (7, "?")}[type(value)]
    return text(key) + struct.pack(f"<I{code}", kind, value)


def tensor(name="a", shape=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(keys=(), tensors=(), data=b"\0" * 128, *, magic=b"GGUF", version=3, counts=None):
    counts = (len(tensors), len(keys)) if counts is None else counts
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


ARRAY = text("x") + struct.pack("<I", 9)
ATTACKS = {
    "empty": b"",
    "another format": gguf_bytes(magic=b"GGML"),
    "version 1": gguf_bytes(version=1),
    "big-endian": gguf_bytes(version=3 << 24),
    "2^63 keys": gguf_bytes(counts=(0, 2**63)),
    "2^63 tensors": gguf_bytes(counts=(2**63, 0)),
    "a string of 2^60 bytes": gguf_bytes([struct.pack("<Q", 2**60)]),
    "an array of 2^60 numbers": gguf_bytes([ARRAY + struct.pack("<IQ", 12, 2**60)]),
    "an array of arrays": gguf_bytes([ARRAY + struct.pack("<IQ", 9, 1)]),
    "an unknown type of value": gguf_bytes([text("x") + struct.pack("<I", 99)]),
    "a key twice": gguf_bytes([number("x", 1), number("x", 1)]),
    "a key that is not UTF-8": gguf_bytes([struct.pack("<Q", 1) + b"\xff" + struct.pack("<II", 4, 1)]),
    "an alignment of 3": gguf_bytes([number("general.alignment", 3)]),
    "no axis": gguf_bytes(tensors=[tensor(shape=())]),
    "2^31 axes": gguf_bytes(tensors=[text("a") + struct.pack("<I", 2**31)]),
    "a size of 0": gguf_bytes(tensors=[tensor(shape=(0,))]),
    "a size of 2^63": gguf_bytes(tensors=[tensor(shape=(2**63,))]),
    "sizes whose product overflows": gguf_bytes(tensors=[tensor(shape=(2**30, 2**30, 2**30, 2**30))]),
    "a type of integers": gguf_bytes(tensors=[tensor(kind=26)]),
    "a part of a block": gguf_bytes(tensors=[tensor(shape=(33,), kind=8)]),
    "cut short": gguf_bytes(tensors=[tensor()])[:-1],
    "an offset beyond the file": gguf_bytes(tensors=[tensor(offset=2**40)]),
    "an offset that is not aligned": gguf_bytes(tensors=[tensor(shape=(1,), offset=4)]),
    "tensors that overlap": gguf_bytes(tensors=[tensor("a"), tensor("b", offset=32)], data=b"\0" * 256),
    "a tensor twice": gguf_bytes(tensors=[tensor("a"), tensor("a", offset=128)], data=b"\0" * 256),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_files_of_strangers(tmp_path, name):
    """One line, and neither time nor memory that the file does not have itself."""
    file = tmp_path / "model.gguf"
    file.write_bytes(ATTACKS[name])
    with pytest.raises(UserError, match=r"not a GGUF file that can be read") as caught:
        load_model(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def architecture(name, **numbers):
    keys = [text("general.architecture") + struct.pack("<I", 8) + text(name)]
    return [*keys, *(number(f"{name}.{key.replace('__', '.')}", value) for key, value in numbers.items())]


SIZES = {"context_length": 8, "embedding_length": 32, "block_count": 1, "attention__head_count": 2}
EPSILON = {"attention__layer_norm_rms_epsilon": 1e-5}
WHOLE = SIZES | EPSILON | {"feed_forward_length": 32}


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("../../etc/passwd", {}, "is not supported; supported"),
        ("llama", {}, "llama.context_length is missing"),
        ("llama", WHOLE | {"block_count": 10_001}, "num_hidden_layers: expected a whole number from 1 to 10000"),
        ("llama", WHOLE | {"attention__head_count": 0}, "num_attention_heads: .* got 0"),
        ("llama", WHOLE | {"swin_norm": 5}, "llama.swin_norm = 5 is not supported"),
        ("llama", WHOLE | {"rope__dimension_count": 4}, "expected 16, got 4"),
        ("llama", SIZES | EPSILON, "feed_forward_length is missing"),
        ("llama", WHOLE | {"context_length": 0}, "max_position_embeddings: expected a whole number from 1"),
        ("llama", WHOLE | {"attention__causal": False}, "is_causal = False is not supported"),
        ("gemma2", SIZES, "gemma2.attention.layer_norm_rms_epsilon is missing"),
    ],
)
def test_descriptions_of_strangers(tmp_path, name, numbers, message):
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes(architecture(name, **numbers), [tensor("token_embd.weight", (32, 1))]))
    with pytest.raises(UserError, match=message):
        read_config(file)


def test_a_factor_without_a_type_is_linear(tmp_path):
    """As llama.cpp reads it."""
    keys = architecture("llama", **WHOLE, rope__scaling__factor=4.0)
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(keys, [tensor("token_embd.weight", (32, 1))]))
    assert read_config(tmp_path / "model.gguf").rope == Rope(scaling="linear", factor=4.0)


def test_tensors_that_are_not_those_of_the_model(tmp_path):
    """Names are names: one with a path in it is an unknown tensor."""
    keys = architecture("llama", **WHOLE)
    tensors = [tensor("token_embd.weight", (32, 1)), tensor("../../../etc/passwd", (32,), offset=128)]
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes(keys, tensors, b"\0" * 256))
    with pytest.raises(UserError, match=r"missing: .*; unknown: \.\./\.\./\.\./etc/passwd"):
        load_model(file)
    with pytest.raises(UserError, match="does not exist"):
        load_model(tmp_path / "other.gguf")
