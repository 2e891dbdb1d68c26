"""What is on disk is verified when it is read: single bits flipped in a head, a converted model, a checkpoint."""

import gc
import re
import shutil
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import model_tensors, write_model

from calibjax import FittedHead, HeadConfig, UserError, load_head, load_model, save_head
from calibjax.models.orbax_checkpoint import save_checkpoint
from calibjax.runtime import checksums
from calibjax.runtime.checksums import array_digests, read_checksums, write_checksums
from calibjax.runtime.sharding import make_mesh
from calibjax.train import OptimizerConfig, create_state
from calibjax.train.checkpoint import Checkpoints

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax, on damaged files


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.bool_], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (16, 24), (3, 8, 4), (2, 3, 8, 6)], ids=str)
def test_the_same_however_an_array_is_divided(monkeypatch, shape, dtype):
    whole = np.asarray(RNG.normal(size=shape) > 0) if dtype == np.bool_ else np.asarray(RNG.normal(size=shape) * 9)
    whole = whole.astype(dtype)
    expected = array_digests({"x": whole})
    assert list(expected) == ["x"]
    assert array_digests({"x": np.array(whole, order="F")}) == expected
    mesh = make_mesh((2, 2, 2))
    axes = [None] * (len(shape) - 2) + [("tensor" if n % 2 == 0 and n else None) for n in shape[-2:-1]]
    axes += ["fsdp" if n % 2 == 0 and n else None for n in shape[-1:]]
    divided = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*axes)))
    assert array_digests({"x": divided}) == expected
    # As where other processes hold the rest: each process hashes what its devices hold.
    table = checksums._part_digests(whole)
    monkeypatch.setattr(checksums, "_is_local", lambda array: False)
    assert checksums._in_whole_parts(divided)
    np.testing.assert_array_equal(checksums._part_digests(divided), table)


def test_what_is_not_in_whole_parts_is_gathered(monkeypatch):
    mesh = make_mesh((3, 1, 1), jax.devices()[:3])
    divided = jax.device_put(np.arange(48.0, dtype=np.float32), NamedSharding(mesh, PartitionSpec("data")))
    monkeypatch.setattr(checksums, "_is_local", lambda array: isinstance(array, np.ndarray))
    assert not checksums._in_whole_parts(divided)
    assert array_digests([divided]) == array_digests([np.arange(48.0, dtype=np.float32)])


def test_every_bit_dtype_and_shape_counts():
    array = RNG.normal(size=(4, 6)).astype(np.float32)
    seen = {array_digests([array])["0"], array_digests([array.view(np.int32)])["0"], array_digests([array.T])["0"]}
    seen.add(array_digests([array.reshape(6, 4)])["0"])
    for bit in range(array.nbytes * 8):
        changed = array.copy()
        changed.view(np.uint8).reshape(-1)[bit // 8] ^= 1 << bit % 8
        seen.add(array_digests([changed])["0"])
    assert len(seen) == 4 + array.nbytes * 8


def test_checksums_cover_files_and_themselves(tmp_path):
    (tmp_path / "note.json").write_text("{}")
    write_checksums(tmp_path, {"x": "12"})
    assert read_checksums(tmp_path, "Mend it.") == {"x": "12"}
    file = tmp_path / "checksums.json"
    text = file.read_text()
    for edited in (text.replace('"12"', '"13"'), text.replace("note", "nose"), "{}", "[]", "", "[" * 100_000, "\udcff"):
        file.write_bytes(edited.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match=r"checksums\.json: damaged or edited .*Mend it\."):
            read_checksums(tmp_path, "Mend it.")
    file.write_text(text)
    note = tmp_path / "note.json"
    for change, message in (
        (lambda: note.write_text("{ }"), ": damaged or edited .*"),
        (lambda: (note.unlink(), note.symlink_to("/proc/self/mem")), ": cannot be read .*"),
        (lambda: note.unlink(), r" is missing\. "),
    ):
        change()
        with pytest.raises(UserError, match=rf"note\.json{message}Mend it\."):
            read_checksums(tmp_path, "Mend it.")


def bits(tree):
    return [(np.asarray(leaf).dtype, np.shape(leaf), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def flip_bits(directory, *, count, seed):
    """A file with one bit flipped, each file once and `count` anywhere: (file, contents)."""
    rng = np.random.default_rng(seed)
    files = [file for file in sorted(directory.rglob("*")) if file.is_file() and file.stat().st_size]
    sizes = np.array([file.stat().st_size for file in files])
    for file in [*files, *(files[number] for number in rng.choice(len(files), count, p=sizes / sizes.sum()))]:
        content = file.read_bytes()
        at, bit = int(rng.integers(len(content))), int(rng.integers(8))
        yield file, content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def outcomes_of(directory, load, **options):
    """Counts what becomes of each harm; `load` raises UserError where it is found, or returns what it was."""
    expected, outcomes = load(), Counter()
    for file, harmed in flip_bits(directory, **options):
        content = file.read_bytes()
        file.write_bytes(harmed)
        try:
            assert load() == expected, f"{file}: read with other contents"
            outcomes["harmless"] += 1
        except UserError as error:
            outcomes["found" if re.fullmatch(f".*{directory}.*", str(error)) else str(error)] += 1
        file.write_bytes(content)
    assert load() == expected
    assert outcomes.keys() <= {"harmless", "found"}, "one line that names the directory"
    gc.collect()  # the warnings of Orbax belong here
    return outcomes


def flip_head(folder, count):
    config = HeadConfig(hidden_size=16, kind="mlp")
    params = jax.jit(config.init)(jax.random.key(0, impl="rbg"))
    save_head(folder / "head", FittedHead(config, params, "ab" * 32, log_factor=1 / 3), notes={"a": 1})

    def load():
        head = load_head(folder / "head")
        return bits(head.params), head.config, head.log_factor, head.fingerprint

    return outcomes_of(folder / "head", load, count=count, seed=1)


def flip_model(folder, count):
    write_model(folder / "source")
    save_checkpoint(folder / "model", load_model(folder / "source"), dtype="float32")

    def load():
        lm = load_model(folder / "model")
        return bits(lm.params), lm.config, lm.fingerprint

    return outcomes_of(folder / "model", load, count=count, seed=2)


def flip_training_checkpoint(folder, count):
    """Of the newer of two steps: that one is found damaged and the one before is read, or it is read as it was."""
    run, optimizer, directory = {"rate": 0.1}, OptimizerConfig().build(9), folder / "checkpoints"
    params = {"w": RNG.normal(size=(8, 6)).astype(np.float32), "b": np.ones(6, np.float32)}
    older = create_state(jax.tree.map(jnp.asarray, params), optimizer)
    newer = older._replace(step=older.step + 4, params=jax.tree.map(lambda x: x * 2, older.params))
    checkpoints = Checkpoints(directory, run)
    checkpoints.save(older, {"next": [0, 3]}, step=2)
    checkpoints.save(newer, {"next": [1, 7]}, step=4)
    checkpoints.close()
    shutil.copytree(directory, folder / "copy")

    def load():
        again = Checkpoints(directory, run)
        restored = again.restore(older)
        again.close()
        assert restored is not None
        state, data = restored
        if int(state.step) == 4:
            return bits(state), data
        assert (bits(state), data) == (bits(older), {"next": [0, 3]})
        assert sorted(entry.name for entry in directory.iterdir()) == ["2"]
        shutil.rmtree(directory)
        shutil.copytree(folder / "copy", directory)
        raise UserError(f"{directory / '4'}: found damaged")

    return outcomes_of(directory / "4", load, count=count, seed=3)


@pytest.mark.parametrize(("flip", "count"), [(flip_head, 14), (flip_model, 1), (flip_training_checkpoint, 4)])
def test_a_flipped_bit_is_found_or_harmless(tmp_path, flip, count):
    outcomes = flip(tmp_path, count)
    assert outcomes.total() > count
    assert outcomes["found"] >= 3, outcomes  # most bits of some files do not matter


def test_the_array_is_named(tmp_path):
    """Weights that differ in one bit, in a sound Orbax directory: a head's and a model's."""
    config = HeadConfig(hidden_size=16, kind="linear")
    tensors = model_tensors()
    for n, name in enumerate(("sound", "changed")):
        params = {"output": {"kernel": jnp.full((16, 1), 1 + n * 1e-6), "bias": jnp.zeros(1)}}
        save_head(tmp_path / "head" / name, FittedHead(config, params, "ab" * 32))
        tensors["model.layers.0.mlp.up_proj.weight"][3, 2] += n * 1e-6
        lm = load_model(write_model(tmp_path / "source" / name, tensors))
        save_checkpoint(tmp_path / "model" / name, lm, dtype="float32")
    for kind in ("head", "model"):
        shutil.rmtree(tmp_path / kind / "sound/params")
        shutil.copytree(tmp_path / kind / "changed/params", tmp_path / kind / "sound/params")
    with pytest.raises(UserError, match=r"sound/params: .*the checksum of output\.kernel differs"):
        load_head(tmp_path / "head/sound")
    for options in ((), (jnp.bfloat16, make_mesh((2, 2, 2)))):
        with pytest.raises(UserError, match=r"params: damaged \(the checksum of layers\.mlp\.up\.kernel differs\)"):
            load_model(tmp_path / "model/sound", *options)
