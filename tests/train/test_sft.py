"""Fine-tuning: its gradient, its steps against PyTorch's, adapters, meshes, resuming, and the model that comes out."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import make_lm, make_sequences, ragged, silent, write_model, write_text

from calibjax.cli import main
from calibjax.data import load_sequences, read_source, validation_split
from calibjax.models import decoder, hf_export, load_model
from calibjax.models.hf_export import save_model
from calibjax.models.lora import LoraConfig
from calibjax.nn.experts import Mixture
from calibjax.runtime.errors import UserError
from calibjax.train import OptimizerConfig, create_state, make_train_step
from calibjax.train.sft import SftObjective, SftOptions, fit_sft
from calibjax.train.tuning import first_state

ADAPTERS = SftOptions(lora_rank=3, lora_alpha=6.0)
LORA = ADAPTERS.lora
assert LORA is not None


def setting(count=8, **changes):
    lm, sequences = make_lm(num_layers=2, **changes), ragged(make_sequences(count))
    return lm, {name: jnp.asarray(value) for name, value in sequences.arrays().items()}


def abstract_adapters(lm, lora):
    return jax.eval_shape(lambda key: decoder.init_adapters(lm.config, lora, key), jax.random.key(0))


def random_adapters(lm):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), abstract_adapters(lm, LORA))


def dense(objective, params, batch):
    """The loss over the whole `[B, T, V]`, by optax."""
    where, targets, options = batch["where"], batch["targets"], objective.options
    z = decoder.logits(
        objective.model, params, batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"]
    )
    z = z / options.temperature
    if options.loss == "brier":
        distance = jnp.square(jax.nn.softmax(z) - jax.nn.one_hot(targets, z.shape[-1])).sum(axis=-1)
        return jnp.sum(jnp.where(where, distance, 0.0))
    labels = optax.smooth_labels(jax.nn.one_hot(targets, z.shape[-1]), options.label_smoothing)
    loss = optax.softmax_cross_entropy(z, labels) + options.z_loss * jax.nn.logsumexp(z, axis=-1) ** 2
    return jnp.sum(jnp.where(where, loss, 0.0))


def assert_close(got, expected, bound):
    got, expected = jax.device_get((got, expected))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        error = float(np.abs(a - b).max() / (np.abs(b).max() + 1e-30))
        print(f"{jax.tree_util.keystr(path)}: {error:.1e}")
        assert error < bound, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (
            {"tie_embeddings": True, "logit_softcap": 3.0},
            {"label_smoothing": 0.3, "z_loss": 1e-2, "temperature": 1.7, "remat": "dots"},
        ),
        ({}, {"loss": "brier", "temperature": 1.7, "remat": "full"}),
    ],
    ids=["everything", "brier"],
)
def test_gradient_equals_the_dense_formula(changes, options):
    """Smoothing without a soft-cap: that of the adapters below, and of the steps that are PyTorch's."""
    lm, batch = setting(**changes)
    objective = SftObjective(model=lm.config, options=SftOptions(**options))
    (loss, tokens), gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))(lm.params, None, batch, {})
    expected, dense_gradient = jax.jit(jax.value_and_grad(lambda p: dense(objective, p, batch)))(lm.params)
    assert float(tokens) == float(batch["where"].sum())
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    assert_close(gradient, dense_gradient, 2e-5)


def test_adapters_are_trained_and_nothing_else():
    lm, batch = setting()
    adapters = random_adapters(lm)
    objective = SftObjective(model=lm.config, options=ADAPTERS)
    (loss, _), gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))(adapters, lm.params, batch, {})
    merged = jax.eval_shape(LORA.merge, lm.params, adapters)

    def through_merged(adapters):
        return dense(objective, LORA.merge(lm.params, adapters), batch)

    expected, dense_gradient = jax.jit(jax.value_and_grad(through_merged))(adapters)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    assert_close(gradient, dense_gradient, 2e-5)
    untouched = decoder.init_adapters(lm.config, LORA, jax.random.key(5))
    same = jax.jit(LORA.merge)(lm.params, untouched)
    chex.assert_trees_all_equal(same, lm.params)
    assert jax.tree.structure(merged) == jax.tree.structure(lm.params)
    attention = abstract_adapters(lm, LoraConfig(targets="attention"))
    assert set(attention["layers"]) == {"attention"}
    assert set(attention["layers"]["attention"]) == {"q", "k", "v", "o"}


def test_validation_is_the_likelihood_alone():
    """Whatever the loss; and weights are trained in float32, whatever they were."""
    config = make_lm().config
    changes = {"label_smoothing": 0.3, "z_loss": 1e-2, "temperature": 1.7, "remat": "full", "alpha": 0.5}
    plain = SftOptions(loss="cross-entropy", label_smoothing=0.3, remat="none")
    assert SftObjective(model=config, options=SftOptions(**changes)).nll_objective().options == plain
    state = first_state({"w": jnp.ones(2, jnp.bfloat16)}, optax.sgd(1.0))
    assert state.params["w"].dtype == jnp.float32


def test_sum_moves_by_the_number_of_tokens():
    """A bound that the gradient does not reach changes nothing; and the second step compiles nothing."""
    lm, batch = setting()
    optimizer = optax.sgd(1e-3)
    moved = {}
    for reduction in ("mean", "sum"):
        step = make_train_step(SftObjective(model=lm.config), optimizer, reduction=reduction, clip_norm=1e6)
        state, metrics = step(create_state(jax.tree.map(jnp.array, lm.params), optimizer), None, batch, {})
        moved[reduction] = np.asarray(state.params["unembedding"]) - np.asarray(lm.params["unembedding"])
    for _ in range(2):
        state, _ = step(state, None, batch, {})
    assert step._cache_size() == 1
    tokens = float(batch["where"].sum())
    assert float(metrics.tokens) == tokens
    # What moved is read off parameters of size 1, each rounded to half a unit in its last place.
    np.testing.assert_allclose(moved["sum"], tokens * moved["mean"], atol=1.5 * tokens * np.finfo(np.float32).eps)


def test_clipping_is_optaxs():
    lm, batch = setting()
    objective, plain, clip_norm = SftObjective(model=lm.config), optax.sgd(1.0), 1e-3

    @jax.jit
    def expected(params):
        gradient = jax.grad(lambda p: objective(p, None, batch, {})[0] / batch["where"].sum())(params)
        clipped, _ = optax.clip_by_global_norm(clip_norm).update(gradient, optax.EmptyState())
        return clipped, optax.tree.norm(gradient)

    clipped, norm = jax.device_get(expected(lm.params))
    step = make_train_step(objective, plain, clip_norm=clip_norm)
    state, metrics = step(create_state(jax.tree.map(jnp.array, lm.params), plain), None, batch, {})
    assert norm > 10 * clip_norm
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
    for new, old, g in zip(*map(jax.tree.leaves, jax.device_get((state.params, lm.params, clipped))), strict=True):
        np.testing.assert_allclose(new, old - g, atol=1e-5 * float(np.abs(g).max()) + 3e-7)


# --- whole fits ---


def fit(directory, lm=None, *, sequences=None, **options):
    lm = make_lm(num_layers=2) if lm is None else lm
    sequences = ragged(make_sequences(48)) if sequences is None else sequences
    chosen = SftOptions(**{"epochs": 2, "batch_size": 16, "learning_rate": 1e-2, "remat": "none"} | options)
    return fit_sft(lm, sequences, chosen, context=silent(directory))


@pytest.mark.slow
def test_adapters_of_a_bfloat16_model():
    """Products are bfloat16, as the kernels' are: gradients of adapters are float32, as exact as those of weights."""
    lm, batch = setting()
    adapters = random_adapters(lm)
    errors = {}
    for options, trained in ((ADAPTERS, adapters), (SftOptions(), LORA.merge(lm.params, adapters))):
        gradients = []
        for dtype in (jnp.float32, jnp.bfloat16):
            objective = SftObjective(model=lm.config, options=options, dtype=dtype)
            frozen = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), lm.params)
            gradient = jax.jit(jax.grad(lambda p, f, o=objective: o(p, f, batch, {})[0]))
            gradients.append(gradient(trained, frozen))
        chex.assert_trees_all_equal_shapes_and_dtypes(gradients[1], trained)
        difference = jax.tree.map(jnp.subtract, *gradients)
        errors[options.lora] = float(optax.global_norm(difference) / optax.global_norm(gradients[0]))
    print(errors)
    assert errors[LORA] < 2 * errors[None]


@pytest.mark.slow
def test_steps_are_pytorchs_and_transformers_loads_the_result(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    source = write_model(tmp_path / "model", tie_word_embeddings=True)
    lm = load_model(source)
    text = write_text(tmp_path / "data.jsonl", rows=40, words=12)
    sequences, _ = load_sequences(read_source(text), lm.tokenizer, seq_len=12, layout="full")
    options = {"validation_fraction": 0.05, "epochs": 5, "weight_decay": 0.01, "schedule": "linear"}
    # Batches of all sequences: their order is nothing to agree on.
    train_rows, _ = validation_split(sequences, SftOptions(**options).validation_fraction, seed=0)
    fitted = fit(tmp_path / "fit", lm, sequences=sequences, batch_size=len(train_rows), warmup_fraction=0.2, **options)
    monkeypatch.setattr(hf_export, "_FILE_BYTES", 3000)
    save_model(tmp_path / "tuned", fitted.config, fitted.params, like=source)
    assert len(list((tmp_path / "tuned").glob("*.safetensors"))) > 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    tuned = load_model(tmp_path / "tuned")
    tokens = sequences.tokens[:4]
    ours = np.asarray(tuned.logits(tokens))
    np.testing.assert_allclose(theirs(torch.tensor(tokens)).logits.detach().numpy(), ours, atol=2e-5)

    model = AutoModelForCausalLM.from_pretrained(source)
    inputs = torch.tensor(sequences.tokens[train_rows])
    targets = torch.tensor(sequences.targets[train_rows]).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01, eps=1e-8)
    for rate in (0.0, 1e-2, 7.5e-3, 5e-3, 2.5e-3):
        optimizer.param_groups[0]["lr"] = rate
        loss = torch.nn.functional.cross_entropy(
            model(inputs).logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    expected = model(torch.tensor(tokens)).logits.detach().numpy()
    moved = np.abs(expected - np.asarray(lm.logits(tokens))).max()
    error = np.abs(ours - expected).max()
    print(f"logits moved by {moved:.2f}; apart from PyTorch's {error:.1e}")
    assert moved > 0.1
    assert error < 2e-3 * moved


@pytest.mark.slow
def test_command(tmp_path, capsys):
    """From files to files: the figures of the saved model are those that are printed, and the report shows them."""
    source, data = write_model(tmp_path / "model"), write_text(tmp_path / "data.jsonl", rows=120, words=16)
    out = tmp_path / "out"
    options = ["--seq-len", "13", "--epochs", "3", "--learning-rate", "0.01", "--mesh", "data=8"]
    command = ["train", "sft", "--model", str(source), "--data", str(data), "--out", str(out), *options, "--quiet"]
    assert main([*command, "--softcap", "20", "--eval-data", str(data)]) == 0
    printed = capsys.readouterr().out
    assert "The fine-tuned model has a lower NLL than the base model" in printed
    assert " are in the fitting part as well" in printed
    assert "WARNING: the config.json of llama has no soft-cap of 20: the figures are with it" in printed
    assert printed.rstrip().endswith("model/ (for --model, or transformers)")
    methods = json.loads((out / "metrics.json").read_text())["held_out"]["methods"]
    assert list(methods) == ["base", "base_temperature", "fine_tuned", "fine_tuned_temperature"]
    assert methods["fine_tuned"]["nll"] < methods["base"]["nll"] - 0.1
    assert methods["fine_tuned_temperature"]["accuracy"] == methods["fine_tuned"]["accuracy"]
    assert "fine-tuned + temperature" in (out / "report.html").read_text()
    assert load_model(out / "model").tokenizer("w1 w2")["input_ids"]


# --- the optimiser ---


def test_optimisers_and_schedules():
    linear = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_fraction=0.2).rate_schedule(10)
    np.testing.assert_allclose(jax.vmap(linear)(jnp.arange(11)), [0, 0.5, *np.arange(8, -1, -1) / 8], atol=1e-6)
    constant = OptimizerConfig(learning_rate=0.5, schedule="constant", warmup_fraction=0.0).rate_schedule(10)
    assert float(constant(9)) == 0.5
    rng = np.random.default_rng(0)
    params, gradient = ({"a": jnp.asarray(rng.normal(size=(130, 140)), jnp.float32)} for _ in range(2))
    ours = OptimizerConfig(kind="adafactor", learning_rate=0.1, schedule="constant", warmup_fraction=0, clip_norm=None)
    optimizer = ours.build(10)
    theirs = optax.adafactor(0.1, multiply_by_parameter_scale=False)
    expected, got = (jax.jit(lambda o=o: o.update(gradient, o.init(params), params)[0])() for o in (theirs, optimizer))
    np.testing.assert_allclose(got["a"], expected["a"], rtol=1e-6)
    size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(optimizer.init, params)))
    assert size < 1000, "no moment of the parameters' size"


def test_experts_stay_frozen():
    """Every request to train them is refused by name."""
    lm = make_lm(family="mixtral", mixture=Mixture(experts=4, per_token=2))
    with pytest.raises(UserError, match="lora_targets: the experts and the router of mixtral have no adapters"):
        SftOptions(lora_rank=2).check_model(lm.config)
    with pytest.raises(UserError, match="mixtral is a mixture of experts, whose weights are frozen here"):
        SftOptions().check_model(lm.config)
    SftOptions(lora_rank=2, lora_targets="attention").check_model(lm.config)
