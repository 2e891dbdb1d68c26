"""Models, sequences and files small enough that a test costs seconds: random, and the same on every machine."""

import contextlib
import functools
import gzip
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from calibjax.data import Sequences
from calibjax.data.synthetic import as_sequences
from calibjax.heads import FittedHead, HeadConfig, head_features
from calibjax.models import DecoderConfig, LanguageModel, abstract_params
from calibjax.runtime.context import RunContext
from calibjax.runtime.sharding import make_mesh

VOCAB, WIDTH, LENGTH = 24, 16, 10
ONE_DEVICE = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"}
"""Environment of a process of its own: one device, and otherwise the flags of the tests."""


def on_one_device(monkeypatch) -> None:
    """Gives commands the devices of a machine that has one."""
    monkeypatch.setattr("calibjax.runtime.distributed.make_mesh", lambda shape: make_mesh(devices=jax.devices()[:1]))


@contextlib.contextmanager
def compilations():
    """A list that grows with every program that is compiled in the block."""
    compiled = []

    def count(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def files_in(folder: Path) -> dict[str, bytes]:
    """The contents of all files below a folder, by their relative paths."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def make_lm(*, seed=0, dtype=jnp.float32, **changes) -> LanguageModel:
    """A random model, sure of itself and wrong: there is much to calibrate."""
    fields = {"family": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 20, "num_layers": 1}
    fields |= {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "max_positions": 32}
    config = DecoderConfig(**{**fields, **changes})
    rng = np.random.default_rng(seed)

    def draw(leaf):
        # Norms stay 1; matrices are large enough that attention and the MLP matter.
        stacked_vector = leaf.ndim < 2 or leaf.shape == (config.num_layers, config.hidden_size)
        return np.ones(leaf.shape, leaf.dtype) if stacked_vector else rng.normal(0, 0.5, leaf.shape).astype(leaf.dtype)

    params = jax.tree.map(lambda leaf: jnp.asarray(draw(leaf)), abstract_params(config))
    return LanguageModel.from_params(config, params, dtype=dtype)


def random_head(lm, kind="linear", features=("hidden_states",), *, log_factor=0.0, **options) -> FittedHead:
    """A head that is far from the identity."""
    options = {"num_heads": 2, "identity_start": False, **options}
    config = HeadConfig(kind=kind, hidden_size=lm.config.hidden_size, features=features, **options)
    params = jax.jit(config.init)(jax.random.key(3, impl="rbg"))
    params = {"log_scale": np.float32(-0.3)} if kind == "constant" else params
    return FittedHead(config, params, lm.fingerprint, log_factor=log_factor)


def head_log_scale(head, hidden, unembedding, **tokens):
    """A head's log inverse temperature of every token, `[B, T]`; `tokens`: `where` and `segment_ids`."""
    features = head_features(head.config.features, jnp.asarray(hidden), unembedding)
    log_scale = head.config.build().apply({"params": head.params}, features, **tokens)
    return jnp.asarray(log_scale) + np.float32(head.log_factor)


def log_scale_of(lm, head, sequences) -> np.ndarray:
    """The head's log inverse temperature of every token, `[S, T]`."""
    tokens = {"where": sequences.where, "segment_ids": sequences.segment_ids}
    run = jax.jit(functools.partial(head_log_scale, head, unembedding=lm.unembedding, **tokens))
    return np.asarray(run(lm.hidden_states(sequences)))


def logged(directory: Path) -> np.ndarray:
    """The losses that a run has logged, of training and validation."""
    rows = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
    return np.array([row.get("loss", row.get("validation_nll")) for row in rows])


def make_sequences(count=40, *, vocab_size=VOCAB, length=LENGTH, seed=0) -> Sequences:
    """Sequences of a Markov chain, `length` predictions each: some tokens have one successor, some several."""
    chain = np.random.default_rng(1).dirichlet(np.full(vocab_size, 0.1), vocab_size).cumsum(axis=1)
    rng = np.random.default_rng(100 + seed)
    tokens = np.empty((count, length + 1), np.int32)
    tokens[:, 0] = rng.integers(0, vocab_size, count)
    for t in range(length):
        tokens[:, t + 1] = np.minimum((chain[tokens[:, t]] < rng.random((count, 1))).sum(axis=1), vocab_size - 1)
    return as_sequences(tokens)


def ragged(sequences: Sequences) -> Sequences:
    """The same sequences as packing leaves them: two segments, padding at the end, and targets that do not count."""
    rng = np.random.default_rng(0)
    count, length = sequences.tokens.shape
    column = np.arange(length, dtype=np.int32)
    ends = rng.integers(length // 2, length + 1, (count, 1))
    cuts = rng.integers(1, length // 2, (count, 1))
    real = column < ends
    segments = np.where(real, 1 + (column >= cuts), 0).astype(np.int32)
    positions = np.where(real, np.where(column >= cuts, column - cuts, column), 0).astype(np.int32)
    where = real & (rng.random((count, length)) < 0.8)
    where[:, 0] = True
    empty = np.where(real, 1, 0).astype(np.int32)
    return sequences._replace(
        tokens=sequences.tokens * empty,
        targets=sequences.targets * empty,
        where=where,
        segment_ids=segments,
        positions=positions,
    )


def answered(lm: LanguageModel, sequences: Sequences, scales=(0.2, 0.8)) -> Sequences:
    """The sequences with targets drawn from the model's own distribution, but flatter than the model believes it.

    The true scale of each token is one of two, and its hidden state determines which: what a head has to find.
    """
    hidden = lm.hidden_states(sequences)
    scale = np.where(np.asarray(hidden, np.float64)[..., 0] > 0, *scales)
    q = np.exp(dense_log_probs(lm, sequences, np.log(scale))).cumsum(axis=-1)
    drawn = (q < np.random.default_rng(0).random(scale.shape)[..., None]).sum(axis=-1)
    targets = np.minimum(drawn, lm.config.vocab_size - 1).astype(np.int32)
    return sequences._replace(targets=np.where(sequences.segment_ids > 0, targets, 0).astype(np.int32))


_LOGITS: dict[tuple, np.ndarray] = {}  # a test asks for the same ones at many temperatures


def dense_log_probs(lm: LanguageModel, sequences: Sequences, log_scale=0.0) -> np.ndarray:
    """log softmax(e^log_scale · logits) over the whole vocabulary, `[S, T, V]`, float64 from the model's own logits."""
    inputs = (sequences.tokens, sequences.segment_ids, sequences.positions)
    key = (lm.fingerprint, lm.dtype, *(np.asarray(x).tobytes() for x in inputs))
    if key not in _LOGITS:
        _LOGITS[key] = np.asarray(lm.logits(inputs[0], segment_ids=inputs[1], positions=inputs[2]), np.float64)
    return scipy.special.log_softmax(_LOGITS[key] * np.exp(np.asarray(log_scale, np.float64))[..., None], axis=-1)


def at_targets(log_probs: np.ndarray, sequences: Sequences) -> np.ndarray:
    """log p(target) of the tokens that count, `[n]`."""
    return np.take_along_axis(log_probs, sequences.targets[..., None], axis=-1)[..., 0][sequences.where]


WORDS = [f"w{number}" for number in range(40)]
LLAMA_JSON = {"model_type": "llama", "vocab_size": 31, "hidden_size": 12, "intermediate_size": 20}
LLAMA_JSON |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA_JSON |= {"max_position_embeddings": 32, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
CONFIG_JSON = LLAMA_JSON | {"vocab_size": len(WORDS) + 3, "num_hidden_layers": 1}


def model_tensors(config=CONFIG_JSON) -> dict[str, np.ndarray]:
    """Of a tied Llama of these sizes."""
    rng, d, inner = np.random.default_rng(0), config["hidden_size"], config["intermediate_size"]
    shapes = {"embed_tokens": (config["vocab_size"], d), "norm": (d,)}
    for at in (f"layers.{number}." for number in range(config["num_hidden_layers"])):
        shapes[f"{at}mlp.down_proj"] = (d, inner)
        shapes |= {f"{at}self_attn.{name}_proj": (d // 2 if name in "kv" else d, d) for name in "qkvo"}
        shapes |= {f"{at}{name}": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}mlp.{name}_proj": (inner, d) for name in ("gate", "up")}
    return {f"model.{name}.weight": rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def write_model(folder: Path, tensors: dict[str, np.ndarray] | None = None, **changes) -> Path:
    """A Llama with a tokenizer of words, as `--model` takes it; `changes` go into config.json."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(model_tensors() if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | changes))
    write_tokenizer(folder, WORDS)
    return folder


def write_tokenizer(folder: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def write_text(file: Path, rows=60, words=24, seed=0) -> Path:
    """JSON lines of words; which word follows depends on the last one, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        row = [int(rng.integers(40))]
        while len(row) < words:
            row.append(int((row[-1] * 7 + rng.integers(3)) % 40))
        lines.append(json.dumps({"text": " ".join(WORDS[i] for i in row)}))
    file.write_text("\n".join(lines) + "\n")
    return file


def write_questions(folder: Path, name: str, rows) -> None:
    """Rows of a benchmark, as `--assets` has them below `folder`."""
    file = folder / "data" / f"{name}.jsonl.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def silent(directory=None, *, log=lambda line: None, **given):
    """A `RunContext` of one device that shows nothing."""
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("mesh", make_mesh(devices=jax.devices()[:1]))
    return RunContext(directory=directory, log=log, progress=False, **given)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|eot_id|>", "<|end_header_id|>", "<|end|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|start_header_id|>", "<|endoftext|>"),
)


def character_tokenizer(chat_template=None, eos="</s>"):
    """A token for each character, and special tokens of chats."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in [10, *range(32, 127)]]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["?!", *characters])}, unk_token="?!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?!", bos_token="<s>", eos_token=eos, chat_template=chat_template
    )
