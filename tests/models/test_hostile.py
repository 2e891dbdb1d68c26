"""Model directories of strangers: attacks on safetensors, indexes, configurations, heads and Orbax's metadata.

Each soon ends in one `UserError`, without the memory that the file names; `campaigns/fuzz_files.py` found some.
"""

import json
import shutil
import struct
import zipfile

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import CONFIG_JSON, write_model

from calibjax.data.table import read_table
from calibjax.heads import FittedHead, HeadConfig
from calibjax.models import config_from_hf
from calibjax.models.generate import default_stop_tokens
from calibjax.models.load import _find_weights, _read_headers, load_model
from calibjax.runtime.checksums import read_checksums, seal, write_checksums
from calibjax.runtime.errors import UserError
from calibjax.train.checkpoint import Checkpoints
from calibjax.train.saved import load_head, save_head

HUGE = 10**12
DEEP = "[" * 100_000

# --- safetensors: its own attacks, and malformed headers ---


def entry(begin=0, end=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def safetensors_file(header, values=b"\x00" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + values


GOOD = safetensors_file({"a": entry()})
TWICE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
ATTACKS = {
    "cut short": GOOD[:-1],
    "a length of 2^64 - 1": safetensors_file({"a": entry()}, length=2**64 - 1),
    "deep JSON": safetensors_file(DEEP.encode()),
    "invalid UTF-8": safetensors_file(b'{"\xff":' + json.dumps(entry()).encode() + b"}"),
    "overlap": safetensors_file({"a": entry(), "b": entry(4, 12)}, b"\x00" * 12),
    "one name twice": safetensors_file(TWICE),
    "offsets beyond the file": safetensors_file({"a": entry(0, 2**62, (2**60,))}),
    "a shape that overflows": safetensors_file({"a": entry(shape=(2**32, 2**32))}),
}


def test_safetensors_that_are_attacks(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(GOOD)
    assert [entry.shape for entry in _read_headers([file])] == [(2,)]
    for name, content in ATTACKS.items():
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"model\.safetensors: damaged or cut short"):
            pytest.fail(f"{name}: {list(_read_headers([file]))}")


@pytest.mark.parametrize(
    "index",
    [
        *({"weight_map": {"a": bad}} for bad in ("../x", "/etc/passwd", "a/b", "..", ".", "", "\x00", 5, None, ["x"])),
        *({"weight_map": value} for value in (None, [], "x", 3)),
        *([], None, 3, "{", DEEP, '{"weight_map":' * 9_999),
    ],
    ids=lambda index: str(index)[:40],
)
def test_indexes(tmp_path, index):
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json"):
        _find_weights(tmp_path)


# --- configurations ---

ANY = (None, "x", [], {}, True, -1, 0, HUGE, 10**400, float("nan"), 1.5, [1], {"a": DEEP[:900]})
FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters"),
    *("rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias", "model_type", "rope_scaling", "dtype"),
    *("bos_token_id", "quantization_config", "layer_types", "auto_map", "is_causal", "architectures"),
)


def test_configurations_of_strangers(tmp_path):
    """Any value in any field: a `UserError`, or a configuration whose sizes are sizes."""
    refused = 0
    for field in FIELDS:
        for value in ANY:
            (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON | {field: value}))
            try:
                config = config_from_hf(tmp_path)
            except UserError as error:
                refused += len(str(error)) < 2000
                continue
            sizes = (config.vocab_size, config.hidden_size, config.num_layers, config.head_dim, config.max_positions)
            assert all(type(size) is int and 1 <= size < 2**31 for size in sizes), (field, value)
            assert config.num_layers <= 10_000
    assert refused > 0.4 * len(FIELDS) * len(ANY), refused


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "3", "{", DEEP, '{"a":' * 100_000, "\ud800", '{"model_type": {}}', '{"model_type": ["llama"]}'],
    ids=lambda text: text[:10],
)
def test_files_that_are_no_configuration(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"config\.json: (not a JSON object|model_type)"):
        config_from_hf(tmp_path)


def test_files_that_are_no_files(tmp_path):
    for target in ("/dev/zero", "config.json", str(tmp_path)):
        (tmp_path / "config.json").symlink_to(target)
        with pytest.raises(UserError, match=r"there is no config\.json"):
            config_from_hf(tmp_path)
        (tmp_path / "config.json").unlink()


def test_settings_beside_the_configuration(tmp_path):
    lm = type("Model", (), {"path": tmp_path, "has_tokenizer": False})()
    for stop in ("x", [None], [1, "x"], HUGE, -1, 1.5, True, [[1]]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
        with pytest.raises(UserError, match="eos_token_id: expected token ids"):
            default_stop_tokens(lm)
    for content, expected in (({"eos_token_id": [1, 2]}, (1, 2)), ({"eos_token_id": 5}, (5,)), ({}, ())):
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        assert default_stop_tokens(lm) == expected
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match="not a JSON object"):
        default_stop_tokens(lm)
    write_model(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for value in ([], "x", {}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": value}))
        with pytest.raises(UserError, match="cannot read the tokenizer files"):
            _ = load_model(tmp_path).tokenizer


@pytest.mark.parametrize("header", ["(", "{'descr': '|O'}", "[" * 9000, "{'descr': '<f8', 'shape': (10**12,)}", "\xff"])
def test_archives_of_arrays(tmp_path, header):
    with zipfile.ZipFile(tmp_path / "table.npz", "w") as archive:
        text = header.encode("latin1") + b"\n"
        archive.writestr("confidence.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    with pytest.raises(UserError, match=r"table\.npz cannot be read"):
        read_table(tmp_path / "table.npz")
    np.savez(tmp_path / "table.npz", confidence=np.zeros(3), correct=np.zeros(4))
    with pytest.raises(UserError, match="same number of rows, got confidence 3, correct 4"):
        read_table(tmp_path / "table.npz")
    with zipfile.ZipFile(tmp_path / "table.npz", "a") as archive:
        archive.writestr("text", "no array")
    with pytest.raises(UserError, match=r"cannot be read as an \.npz file"):
        read_table(tmp_path / "table.npz", columns={"text": "text"})


# --- heads and checkpoints ---


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    directory = tmp_path_factory.mktemp("head") / "head"
    config = HeadConfig(kind="mlp", hidden_size=6, intermediate_size=4)
    save_head(directory, FittedHead(config, config.init(jax.random.key(0)), "0" * 64, log_factor=0.1))
    return directory


def test_heads_of_strangers(tmp_path, head):
    """With checksums of its own, as whoever makes a head can write them."""
    shutil.copytree(head, tmp_path / "head")
    description, arrays = json.loads((head / "head.json").read_text()), read_checksums(head, "")
    file = tmp_path / "head" / "head.json"

    def write(text):
        file.write_text(text)
        (file.parent / "checksums.json").unlink()
        write_checksums(file.parent, arrays)

    write(json.dumps(description))
    assert load_head(file.parent).config.hidden_size == 6
    for field in description["head"]:
        for value in (None, "x", [], {}, -1, HUGE, 2**31 - 1, float("nan"), [["x"]]):
            if (field, value) in (("intermediate_size", None), ("num_heads", None), ("num_heads", 2**31 - 1)):
                continue
            write(json.dumps(description | {"head": description["head"] | {field: value}}))
            with pytest.raises(UserError, match="head"):
                pytest.fail(f"{field}={value}: {load_head(file.parent)}")
    bad = [{"log_factor": value} for value in (1e9, [], "much", float("nan"), float("inf"))]
    for changes in (*bad, {"head": []}, {"head": {"x": 1}}, {"head": description["head"] | {"x": 1}}, {"schema": []}):
        write(json.dumps(description | changes))
        with pytest.raises(UserError, match=r"head\.json"):
            load_head(file.parent)
    for text in (DEEP, "", "{", "[1]", "null", '{"schema": 1}', json.dumps(description).replace("base_", "")):
        write(text)
        with pytest.raises(UserError, match=r"head\.json"):
            load_head(file.parent)


@pytest.mark.parametrize("name", ["../model.safetensors", "/proc/kcore", "params/../../x"])
def test_names_that_leave_a_directory_of_a_head(tmp_path, head, name):
    """`checksums.json` names files, which are read: its own seal can be made by anyone."""
    shutil.copytree(head, tmp_path / "head")
    file = tmp_path / "head" / "checksums.json"
    content = json.loads(file.read_text())
    content["files"][name] = "0" * 64
    file.write_text(json.dumps(seal({key: content[key] for key in ("files", "arrays")})))
    with pytest.raises(UserError, match="expected names of files of this directory"):
        load_head(tmp_path / "head")


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "model.layers.0/../../x"])
def test_names_of_tensors_that_are_paths(tmp_path, name):
    write_model(tmp_path / "base")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {f"base_model.model.{name}.lora_{side}.weight": np.ones((1, 1), np.float32) for side in "AB"}
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="adapter"):
        load_model(tmp_path / "base", adapter=tmp_path / "adapter")


def test_directory_of_checkpoints_that_was_edited(tmp_path):
    directory = tmp_path / "checkpoints"
    checkpoints = Checkpoints(directory, {})
    checkpoints.save(({"w": np.ones(3, np.float32)},), {"at": 1}, step=1)
    checkpoints.close()
    for text in ("3", "[]", '{"item_handlers": 3}', "null"):
        (directory / "1" / "_CHECKPOINT_METADATA").write_text(text)
        with pytest.raises(UserError, match=r"cannot be read|no checkpoint is whole"):
            Checkpoints(directory, {}).restore(({"w": np.ones(3, np.float32)},))
