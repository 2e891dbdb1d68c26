"""A model and text as the material of a comparison: every next token is a prediction."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from calibjax.commands.common import split_text
from calibjax.commands.compare.material import CompareOptions, Material
from calibjax.commands.train_ats import fit_ats
from calibjax.data import Sequences, check_context, eval_batches
from calibjax.eval.compare.contenders import Contender, Outcome, contenders
from calibjax.eval.tokens import evaluate_tokens, identity_head
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel, load_model
from calibjax.models.frozen import freeze
from calibjax.recalibrate import METHODS, Predictions
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import about
from calibjax.train.checkpoint import save_head
from calibjax.train.options import AtsOptions, make_plan
from calibjax.train.temperature import fit_single_temperature

_LOGITS_HELD = 2**28  # numbers of each part: a gibibyte


def from_model(
    options: CompareOptions,
    names: tuple[str, ...],
    fits: Path,
    log: Callable[[str], None],
    *,
    however_large: bool,
) -> Material:
    """Methods on the next tokens of a text; `fits` holds the checkpoints of ATS, `however_large` as `contenders`'."""
    assert options.model is not None
    assert options.data is not None
    with about("--model"):
        lm = load_model(options.model, dtype=jnp.dtype(options.dtype))
    log(f"model: {lm!r}")
    check_context(options.text.seq_len, lm.config.max_positions)
    sequences = options.text.read(options.data, lm, log, split=options.split)
    parts = split_text(sequences, options.fit_fraction, log, order=options.split_order, seed=options.seed)
    plan = make_plan(AtsOptions(), lm.config.hidden_size)
    batch_size = plan.batch_size

    heads = ("temperature", "ats")  # fitted and tested by statistics of the logits, which are not held
    others = tuple(name for name in names if name not in heads)
    needs_logits = any("logits" in METHODS[name].fit_reads for name in others)
    limit = options.max_tokens
    if needs_logits:
        limit = min(limit, max(1, _LOGITS_HELD // lm.config.vocab_size))
    fit, held_out = (_subsample(part, limit, options.seed) for part in parts)
    log(
        f"split: {_tokens(fit):,} tokens to fit on, {_tokens(held_out):,} held out, of "
        f"{_tokens(parts[0]):,} and {_tokens(parts[1]):,}"
        + (
            " (--max-tokens" + (", or a GiB of logits" if limit < options.max_tokens else "") + ")"
            if fit is not parts[0]
            else ""
        )
    )

    def outcome_of(head: FittedHead, sequences: Sequences) -> Outcome:
        done = evaluate_tokens(
            lm, sequences, {"head": head}, batch_size=batch_size, keep_tokens=True, context=RunContext(progress=False)
        )
        tokens = done["head"].tokens
        assert tokens is not None
        where = sequences.where
        confidence, choice, log_prob = (
            np.asarray(x)[where] for x in (tokens.confidence, tokens.argmax, tokens.log_prob)
        )
        return Outcome(confidence, (choice == sequences.targets[where]).astype(np.float32), choice, log_prob)

    def temperature() -> FittedHead:
        return fit_single_temperature(lm, freeze(lm), fit.arrays(), batch_size)[1]

    def ats() -> FittedHead:
        return fit_ats(lm, fit, plan, RunContext(directory=fits / "ats", seed=options.seed).silent()).head

    base, rows, left_out = outcome_of(identity_head(lm), held_out), {}, {}
    for name, fit_head in (("temperature", temperature), ("ats", ats)):
        if name == "temperature" or name in names:
            rows[name] = Contender(fit_head, lambda head: outcome_of(head, held_out), _head_parameters)
    if others:
        calibration, testing = (
            _predictions(lm, sequences, outcome, batch_size, logits=needs_logits)
            for sequences, outcome in ((fit, outcome_of(identity_head(lm), fit)), (held_out, base))
        )
        more, left_out = contenders(calibration, testing, base, others, however_large=however_large)
        rows |= more
        if calibration.unembedding is None and "feature_clipping" in left_out:
            left_out["feature_clipping"] = "the model's logits have a soft-cap or a bias, which it does not know"
    return Material(
        base,
        rows,
        left_out,
        "temperature",
        _clusters(held_out),
        "tokens",
        "sequences" if _one_row(held_out) else "rows of the text",
        f"{Path(options.model.rstrip('/')).name} on {Path(options.data.rstrip('/')).name}, held out",
        functools.partial(save_head, notes={"model": options.model, "data": options.data}),
    )


def _tokens(sequences: Sequences) -> int:
    return int(sequences.where.sum())


def _head_parameters(head: FittedHead) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(head.params))


def _subsample(sequences: Sequences, limit: int, seed: int) -> Sequences:
    """At most `limit` tokens: sequences drawn at random until the next would exceed it, at least one, in order."""
    sizes = sequences.where.sum(axis=1)
    if sizes.sum() <= limit:
        return sequences
    order = np.random.default_rng(seed).permutation(len(sizes))
    number = max(1, int(np.searchsorted(np.cumsum(sizes[order]), limit, side="right")))
    return sequences.take(np.sort(order[:number]))


def _one_row(sequences: Sequences) -> bool:
    return bool((sequences.source == sequences.source[0]).all())


def _clusters(sequences: Sequences) -> np.ndarray:
    """Of each token that counts: its row of the text, from 0; its sequence where all are of one row."""
    number = np.unique(sequences.source, return_inverse=True)[1]
    number = np.arange(len(number)) if _one_row(sequences) else number
    return np.broadcast_to(number[:, None], sequences.where.shape)[sequences.where].astype(np.int32)


def _predictions(
    lm: LanguageModel, sequences: Sequences, outcome: Outcome, batch_size: int, *, logits: bool
) -> Predictions:
    """The tokens that count, with everything that the methods read; logits only where they are asked for."""
    hidden, z = [], []
    for batch, real in eval_batches(sequences.arrays(), batch_size):
        tokens, segments, positions = (batch[name] for name in ("tokens", "segment_ids", "positions"))
        where = np.asarray(batch["where"])
        where[real:] = False
        hidden.append(
            np.asarray(lm.hidden_states(tokens, segment_ids=segments, positions=positions), np.float32)[where]
        )
        if logits:
            z.append(np.asarray(lm.logits(tokens, segment_ids=segments, positions=positions), np.float32)[where])
    linear = lm.config.logit_softcap is None and lm.unembedding_bias is None
    return Predictions(
        logits=np.concatenate(z) if logits else None,
        labels=sequences.targets[sequences.where],
        confidence=outcome.confidence,
        correct=outcome.correct,
        features=np.concatenate(hidden),
        unembedding=np.asarray(lm.unembedding, np.float32) if linear else None,
        slices=_clusters(sequences),
    )
