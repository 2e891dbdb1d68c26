"""Adaptive Temperature Scaling (arXiv 2409.19817): a head chosen by cross-fitting, and fitted to all sequences."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from calibjax.data import Sequences, concatenate, fold_indices, limit_tokens
from calibjax.data.load import Source, as_sequences, check_is_model
from calibjax.heads import FittedHead
from calibjax.models.own import FrozenModel, place_model
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host
from calibjax.runtime.sharding import check_batch
from calibjax.train.candidates import Candidate, CandidateFits
from calibjax.train.cross_fit import shrink
from calibjax.train.curves import TokenCurves, token_curves
from calibjax.train.options import AtsOptions, AtsPlan, make_plan
from calibjax.train.solve import fit_token_temperature


class AtsFit(NamedTuple):
    """Result of `fit_ats`.

    Attributes:
        head: the fitted head.
        temperature: temperature scaling, as a head.
        report: JSON-able: plan, candidate (its name), temperature (T), refit (or None), sequences (number by set).
        comparison: JSON-able: every candidate on sequences that it was not fitted on; None if nothing was compared.
    """

    head: FittedHead
    temperature: FittedHead
    report: dict[str, Any]
    comparison: dict[str, Any] | None = None

    @property
    def heads(self) -> dict[str, FittedHead]:
        """Temperature scaling and the fitted head by name, as `calibjax.evaluate` takes them."""
        return {"temperature": self.temperature, "ats": self.head}

    def __repr__(self) -> str:
        chosen, temperature = self.report["candidate"], self.report["temperature"]
        return f"AtsFit({self.head!r}, candidate {chosen}, temperature {temperature:.4g})"


def fit_ats(
    lm: FrozenModel,
    data: Sequences | Source | Mapping[str, Sequences | Source],
    options: AtsOptions = AtsOptions(),
    context: RunContext | None = None,
) -> AtsFit:
    """Fits temperature scaling and an ATS head to a frozen model.

    The model runs once, and its scale curves are stored (`train.curves`); heads are fitted on them. With a directory in
    `context`, a killed fit that is called again with the same arguments resumes, and ends with a bit-identical head.

    Args:
        lm: the frozen model, a `LanguageModel` or your own by `from_function` or `from_arrays`; on `context.mesh`.
        data: sequences to fit on, or what `load_text` takes; or several sets by name, such as one per domain. Where a
            head or a loss is chosen or a temperature refitted, each fold of the rows, or each set, is predicted by a
            head fitted on the others. In the end the head is fitted on all.
        options: see `AtsOptions`.
        context: directory, devices, seed, log and progress.

    Returns:
        `AtsFit`, its heads on the host.

    Raises:
        UserError: invalid options, sequences that do not fit the model, or a directory with another run.
        NonFiniteLossError: training diverged.

    Example:
        >>> import calibjax
        >>> lm = calibjax.LanguageModel.random(vocab_size=32)
        >>> texts = [[(row + step) % 32 for step in range(20)] for row in range(40)]
        >>> data = calibjax.load_text(texts, lm, seq_len=16)
        >>> options = calibjax.AtsOptions(loss="cross-entropy", head_kind="constant")
        >>> fitted = calibjax.fit_ats(lm, data, options, calibjax.RunContext().silent())
        >>> list(fitted.heads)
        ['temperature', 'ats']
    """
    context = context or RunContext()
    sets = data if isinstance(data, Mapping) else {"fit": data}
    check_is_model(lm)
    plan = make_plan(options, lm.config.hidden_size)
    check_batch(context.mesh, plan.batch_size, plan.accumulate)
    sets = {name: as_sequences(part, lm) for name, part in sets.items()}
    lm = place_model(lm, context.mesh)
    if context.directory is None:
        plan = dataclasses.replace(plan, keep="memory")
    sets = {name: limit_and_log(part, plan.max_tokens, context, f"to fit on ({name})") for name, part in sets.items()}
    sequences = concatenate(list(sets.values()))
    folds = _folds(sequences, sets, plan, context.seed)
    losses = [trial.loss for trial in plan.trials]
    with context.with_directory() as context, jax.set_mesh(context.mesh):
        tokens = token_curves(
            lm, sequences, plan.heads, losses=losses, keep=plan.keep, batch_size=plan.batch_size, context=context
        )
        fitted = _fit(lm, tokens, plan, context, folds, by_set=len(sets) > 1)
    fitted.report["sequences"] = {name: len(part.tokens) for name, part in sets.items()}
    return fitted


def limit_and_log(sequences: Sequences, max_tokens: int, context: RunContext, purpose: str) -> Sequences:
    """`limit_tokens` with the seed of `context`; logs how many tokens are used for `purpose` if some are left out."""
    fewer = limit_tokens(sequences, max_tokens, seed=context.seed)
    if fewer is not sequences:
        used, available = (int(part.where.sum()) for part in (fewer, sequences))
        context.log(f"{purpose}: {used:,} of {available:,} tokens, in random sequences (max_tokens={max_tokens})")
    return fewer


def _folds(sequences: Sequences, sets: Mapping[str, Sequences], plan: AtsPlan, seed: int) -> list[np.ndarray]:
    """The sequences of each fold: the sets, or parts of one; none where nothing is chosen or refitted."""
    candidates = len(plan.heads) * len(plan.decays) * len(plan.trials)
    if candidates == 1 and not plan.refit_temperature:
        return []
    if len(sets) > 1:
        ends = np.cumsum([len(part.tokens) for part in sets.values()])
        return np.split(np.arange(ends[-1]), ends[:-1])
    return fold_indices(sequences, plan.folds, seed=seed)


def _fit(
    lm: FrozenModel, tokens: TokenCurves, plan: AtsPlan, context: RunContext, folds: list[np.ndarray], *, by_set: bool
) -> AtsFit:
    """`fit_ats` from the curves: chooses among the candidates of `plan` out of fold, and fits the chosen one to all."""
    fit = fit_token_temperature(tokens)
    note = "" if fit.converged else " (no finite optimum: the bound was used)"
    context.log(f"temperature scaling: {fit.temperature:.4f}, NLL {fit.nll_before:.4f} -> {fit.nll:.4f}{note}")
    temperature = FittedHead.constant(lm, fit.log_scale)
    fits = CandidateFits(tokens, plan, context, folds, fit.log_scale, by_set)
    chosen, comparison = fits.choose() if folds else (None, None)
    candidate = fits.candidates()[0] if chosen is None else chosen.candidate
    report = {"plan": dataclasses.asdict(plan), "temperature": fit.temperature, "refit": None}
    report["candidate"] = str(candidate)
    if not isinstance(candidate, Candidate):  # temperature scaling was chosen
        return AtsFit(temperature, temperature, report, comparison)
    params = to_host(fits.fit_to_all(candidate))
    log_factor = 0.0
    if chosen is not None:
        params = shrink_head(params, fit.log_scale, chosen.shrinkage)
        log_factor = chosen.log_factor
        refit = chosen.refit
        if refit is not None:
            factor = math.exp(refit.log_scale)
            error = refit.standard_error
            is_applied = log_factor != 0.0
            verdict = "applied" if is_applied else "not applied, within its noise"
            context.log(f"refit on top: scale x {factor:.4f} (standard error of its log {error:.4f}): {verdict}")
            report["refit"] = {"factor": factor, "standard_error_of_log": error, "applied": is_applied}
    head = FittedHead(candidate.head, params, lm.fingerprint, log_factor=log_factor)
    return AtsFit(head, temperature, report, comparison)


def fit_temperature_head(lm: FrozenModel, sequences: Sequences, batch_size: int) -> FittedHead:
    """Temperature scaling on sequences, as a head; on the current mesh (`jax.set_mesh`)."""
    tokens = token_curves(lm, sequences, batch_size=batch_size, context=RunContext().silent())
    return FittedHead.constant(lm, fit_token_temperature(tokens).log_scale)


def shrink_head(params: Any, towards: float, shrinkage: float) -> Any:
    """Moves a head towards one temperature: before clipping, its log s becomes `shrink(log s, towards, shrinkage)`."""
    if "output" not in params:  # one temperature
        return jax.tree.map(lambda x: shrink(x, towards, shrinkage), params)
    kernel = np.float32(1 - shrinkage) * params["output"]["kernel"]
    output = {"kernel": kernel, "bias": shrink(params["output"]["bias"], towards, shrinkage)}
    return {**params, "output": output}
