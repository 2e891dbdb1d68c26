"""The loop over a small regression: interrupted and resumed, diverging, logged, and refused."""

import functools
import gc
import itertools
import json
import math
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calibjax.data import batches
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import make_mesh, replicated
from calibjax.train import NonFiniteLossError, OptimizerConfig, create_state, loop, make_train_step
from calibjax.train.loop import train

STEPS, WIDTH = 6, 5
OPTIMIZER = OptimizerConfig(learning_rate=0.1).build(STEPS)


def objective(params, frozen, batch, hyper):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.sum(jnp.where(batch["where"], jnp.square(error), 0.0)), jnp.sum(batch["where"]).astype(jnp.float32)


@pytest.fixture(autouse=True, scope="module")
def log_every_step():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "LOG_EVERY", 1)
        yield


STEP = make_train_step(objective, OPTIMIZER)


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, WIDTH)).astype(np.float32)
    return {"x": x, "y": (x @ np.arange(WIDTH)).astype(np.float32), "where": rng.random(32) < 0.9}


def run(directory, *, steps=STEPS, step_fn=STEP, identity=None, progress=False, **options):
    mesh = make_mesh(devices=jax.devices()[:1])
    params = {"w": jnp.zeros(WIDTH), "b": jnp.zeros(())}
    options = {"checkpoint_every": 2} | options
    return train(
        step_fn,
        jax.device_put(create_state(params, OPTIMIZER), replicated(mesh)),
        None,
        {},
        batches(data(), 8, seed=3, epochs=2),  # 8 batches of 4 an epoch: the break falls inside one
        steps=steps,
        context=RunContext(directory=directory, mesh=mesh, progress=progress, title="test"),
        identity=identity or {"plan": {"rate": 0.1}, "fingerprint": "abc"},
        **options,
    )


def changed_at(step, change):
    """The step function, with `change(metrics, state)` in place of its metrics at one step."""

    def step_fn(state, *rest):
        state, metrics = STEP(state, *rest)
        return state, change(metrics) if int(state.step) == step else metrics

    return step_fn


def dies_at(step):
    def die(metrics):
        raise KeyboardInterrupt

    return changed_at(step, die)


same_bits = functools.partial(chex.assert_trees_all_equal, strict=True)


def logged(directory):
    return [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]


def saved(directory):
    return sorted(int(entry.name) for entry in (directory / "checkpoints").iterdir() if entry.name.isdigit())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    state = run(directory)
    assert int(state.step) == STEPS
    assert saved(directory) == [4, 6]  # the newest two
    return state, logged(directory)


def numbers(rows):
    return [{name: row[name] for name in ("step", "loss", "grad_norm")} for row in rows]


def test_training_is_what_the_formula_says(whole):
    """The first loss and the first step of Adam, with warm-up of 0 steps of 6, by hand."""
    first = whole[1][0]
    batch = next(batches(data(), 8, seed=3, epochs=2))
    y, where = batch["y"].astype(np.float64), batch["where"]
    gradient = -2 * np.append((batch["x"] * y[:, None])[where].sum(axis=0), y[where].sum()) / where.sum()
    np.testing.assert_allclose(first["loss"], np.square(y[where]).mean(), rtol=1e-6)
    np.testing.assert_allclose(first["grad_norm"], np.linalg.norm(gradient), rtol=1e-6)


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_a_resumed_run_is_the_same_to_the_bit(whole, tmp_path, stop):
    assert int(run(tmp_path, steps=stop).step) == stop
    state = run(tmp_path)
    same_bits(state, whole[0])
    assert numbers(logged(tmp_path)) == numbers(whole[1])


def test_interrupted_between_checkpoints(whole, tmp_path):
    for step in (2, 3, 6):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, step_fn=dies_at(step))
    with (tmp_path / "train.jsonl").open("a") as log:
        log.write('{"step": 6, "lo')  # what a kill leaves of a line
    same_bits(run(tmp_path), whole[0])
    assert [row["step"] for row in logged(tmp_path)] == [1, 2, 3, 4, 5, 6]
    same_bits(run(tmp_path), whole[0])  # finished: nothing more happens
    assert numbers(logged(tmp_path)) == numbers(whole[1])


@pytest.mark.parametrize(("step", "field", "value"), [(4, "loss", math.nan), (5, "grad_norm", math.inf)])
def test_a_value_that_is_not_finite_stops_the_run(whole, tmp_path, step, field, value):
    with pytest.raises(NonFiniteLossError, match=rf"step {step} .*{value}") as caught:
        run(tmp_path, step_fn=changed_at(step, lambda metrics: metrics._replace(**{field: jnp.float32(value)})))
    assert str(tmp_path / "checkpoints") in str(caught.value)
    assert saved(tmp_path) == {4: [2], 5: [2, 4]}[step]
    assert [row["step"] for row in logged(tmp_path)] == list(range(1, step))
    same_bits(run(tmp_path), whole[0])


def test_log(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop, "LOG_EVERY", 4)
    run(tmp_path, progress=True)
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [4, 6]
    assert all(set(row) == {"step", "loss", "grad_norm", "tokens_per_second"} for row in rows)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    events = list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert b"grad_norm" in events[0].read_bytes()
    bar = capsys.readouterr().err
    assert "tokens/s" in bar
    assert "6/6" in bar
    run(tmp_path / "quiet")
    assert capsys.readouterr().err == ""


def test_checkpoints_of_another_run_are_refused(tmp_path):
    run(tmp_path, steps=2, identity={"plan": {"rate": 0.1}, "fingerprint": "abc", "seed": 1})
    before = (tmp_path / "train.jsonl").read_text()
    with pytest.raises(UserError, match=r"another run \(different: dtype, fingerprint, seed\)"):
        run(tmp_path, identity={"plan": {"rate": 0.1}, "fingerprint": "other", "dtype": "float32"})
    assert (tmp_path / "train.jsonl").read_text() == before


def test_restored_state_lies_on_the_mesh(tmp_path):
    run(tmp_path, steps=2)
    before = STEP._cache_size()
    seen = []
    run(tmp_path, step_fn=lambda state, *rest: (seen.append(state.params["w"].sharding), STEP(state, *rest))[1])
    assert len(seen) == 4
    assert all(sharding.is_fully_replicated for sharding in seen)
    assert STEP._cache_size() == before, "a resumed run compiles its step anew"
    assert list(itertools.pairwise(saved(tmp_path))) == [(4, 6)]


def truncated(step):
    data = max((step / "state").rglob("*"), key=lambda f: f.stat().st_size if f.is_file() else -1)
    data.write_bytes(data.read_bytes()[:20])


def other_position(step):
    file = step / "data/metadata"
    text = file.read_text()
    changed = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), text, count=1)
    assert changed != text
    file.write_text(changed)


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that stopped after 4 steps."""
    directory = tmp_path_factory.mktemp("stopped")
    run(directory, steps=4)
    return directory


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax, on damaged files
@pytest.mark.parametrize("damage", [truncated, other_position, empty])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(whole, stopped, tmp_path, damage, caplog):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    assert saved(tmp_path) == [2, 4]
    damage(tmp_path / "checkpoints/4")
    taken = []
    state = run(tmp_path, step_fn=lambda state, *rest: (taken.append(int(state.step)), STEP(state, *rest))[1])
    assert taken == [2, 3, 4, 5]
    same_bits(state, whole[0])
    assert numbers(logged(tmp_path)) == numbers(whole[1])
    assert saved(tmp_path) == [4, 6]
    (record,) = [record for record in caplog.records if record.name.startswith("calibjax")]
    assert re.search(
        r"checkpoints: the checkpoint of step 4 is damaged \(.+\) and is removed; resuming from step 2", record.message
    )
    gc.collect()  # the warnings of Orbax belong here
    caplog.clear()
    same_bits(run(tmp_path), whole[0])
    assert not caplog.records


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax, on damaged files
def test_no_checkpoint_is_whole(tmp_path):
    run(tmp_path, steps=4)
    shutil.rmtree(tmp_path / "checkpoints/2/state")
    other_position(tmp_path / "checkpoints/4")
    before = logged(tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint is whole \(step 4: the checksum of data .*; step 2:") as caught:
        run(tmp_path)
    assert "\n" not in str(caught.value)
    assert saved(tmp_path) == [2, 4]
    assert logged(tmp_path) == before
    gc.collect()


def test_a_file_in_place_of_the_checkpoints(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="checkpoints: expected a directory of checkpoints, found a file"):
        run(tmp_path)
