"""A model and text as the inputs of a comparison: every next token is a prediction."""

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calibjax.data import Sequences, eval_batches
from calibjax.data.sequences import limit_tokens, row_groups
from calibjax.eval.compare import ComparisonInputs, Contender, Outcome, contenders
from calibjax.eval.tokens import evaluate_tokens
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.recalibrate import METHODS, Predictions
from calibjax.runtime.arrays import round_up
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host, together
from calibjax.runtime.sharding import batch_shards
from calibjax.train.ats import fit_ats, fit_temperature_head
from calibjax.train.options import RECIPES, AtsOptions
from calibjax.train.saved import save_head

_LOGITS_HELD = 2**28  # numbers of each part: a gibibyte


def from_model(options: Any, names: tuple[str, ...], context: RunContext, *, include_large: bool) -> ComparisonInputs:
    """Methods on the next tokens of a text, by the `CompareOptions`; `include_large`: see `contenders`.

    The model, temperature scaling and ATS run on the mesh of `context`; the other methods in every process alike.
    """
    assert options.model is not None
    assert options.data is not None
    log, mesh = context.log, context.mesh
    lm = options.load(mesh, log)
    sequences = together(functools.partial(options.text.read, options.data, lm, log, split=options.split))
    parts = options.split_text(sequences, log, options.seed)
    batch_size = round_up(RECIPES["default"]["batch_size"], batch_shards(mesh))

    heads = ("temperature", "ats")  # fitted and tested by statistics of the logits, which are not held
    others = tuple(name for name in names if name not in heads)
    needed_fields = {field for name in others for field in METHODS[name].fit_reads}
    limit = options.max_tokens
    if "logits" in needed_fields:
        limit = min(limit, max(1, _LOGITS_HELD // lm.config.vocab_size))
    fit, held_out = (limit_tokens(part, limit, seed=options.seed) for part in parts)
    counts = [f"{int(part.where.sum()):,}" for part in (fit, held_out, *parts)]
    reason = ", or a GiB of logits" if limit < options.max_tokens else ""
    note = f" (--max-tokens{reason})" if fit is not parts[0] else ""
    log(f"split: {counts[0]} tokens to fit on, {counts[1]} held out, of {counts[2]} and {counts[3]}{note}")

    def outcome_of(head: FittedHead, sequences: Sequences) -> Outcome:
        with jax.set_mesh(mesh):
            results = evaluate_tokens(
                lm, sequences, {"head": head}, batch_size=batch_size, keep_tokens=True, context=context.silent()
            )
        tokens, where = results["head"].tokens, sequences.where
        assert tokens is not None
        fields = (tokens.confidence, tokens.argmax, tokens.log_prob)
        confidence, choice, log_prob = (np.asarray(field)[where] for field in fields)
        correct = (choice == sequences.targets[where]).astype(np.float32)
        return Outcome(confidence, correct, choice, log_prob)

    def temperature() -> FittedHead:
        with jax.set_mesh(mesh):
            return fit_temperature_head(lm, fit, batch_size)

    def ats() -> FittedHead:
        return fit_ats(lm, fit, AtsOptions(batch_size=batch_size), context.within("ats").silent()).head

    uncalibrated = FittedHead.constant(lm)
    base, compared, left_out = outcome_of(uncalibrated, held_out), {}, {}
    for name, fit_head in (("temperature", temperature), ("ats", ats)):
        if name == "temperature" or name in names:
            compared[name] = Contender(fit_head, lambda head: outcome_of(head, held_out))
    if others:
        fitted = outcome_of(uncalibrated, fit)
        with jax.set_mesh(mesh):
            linear = lm.config.logit_softcap is None and lm.unembedding_bias is None
            matrix = to_host(lm.unembedding).astype(np.float32) if linear and "unembedding" in needed_fields else None
            calibration = _predictions(lm, fit, fitted, batch_size, needed_fields, matrix)
            testing = _predictions(lm, held_out, base, batch_size, needed_fields, matrix)
        more, left_out = contenders(calibration, testing, base, others, include_large=include_large)
        compared |= more
        if calibration.unembedding is None and "feature_clipping" in left_out:
            left_out["feature_clipping"] = "the model's logits have a soft-cap or a bias, which it does not know"
    sequence_groups, _ = row_groups(held_out)
    token_groups = np.broadcast_to(sequence_groups[:, None], held_out.where.shape)[held_out.where]
    notes = {"model": options.model, "data": options.data, "adapter": options.adapter and str(options.adapter)}
    return ComparisonInputs(
        base=base,
        contenders=compared,
        left_out=left_out,
        reference="temperature",
        groups=token_groups.astype(np.int32),
        unit="tokens",
        clusters="sequences" if len(np.unique(held_out.source)) == 1 else "rows of the text",
        title=f"{Path(options.model.rstrip('/')).name} on {Path(options.data.rstrip('/')).name}, held out",
        save_head=functools.partial(save_head, notes=notes),
    )


def _predictions(
    lm: LanguageModel,
    sequences: Sequences,
    outcome: Outcome,
    batch_size: int,
    fields: Collection[str],
    unembedding: np.ndarray | None,
) -> Predictions:
    values: dict[str, list[np.ndarray]] = {name: [] for name in ("features", "logits") if name in fields}
    compute = {"features": lm.hidden_states, "logits": lm.logits}
    for batch, real in eval_batches(sequences.arrays(), batch_size):
        where = np.array(to_host(batch["where"]))
        where[real:] = False
        at = {name: batch[name] for name in ("segment_ids", "positions")}
        for name, parts in values.items():
            parts.append(to_host(compute[name](batch["tokens"], **at)).astype(np.float32)[where])
    return Predictions(
        **{name: np.concatenate(parts) for name, parts in values.items()},
        labels=sequences.targets[sequences.where],
        confidence=outcome.confidence,
        correct=outcome.correct,
        unembedding=unembedding,
    )
