"""Long Horizon Temperature Scaling of a language model (arXiv 2302.03686), and the baseline by likelihood quantiles."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from calibjax.data import Sequences, check_ids
from calibjax.data.load import Source, as_sequences
from calibjax.kernels import linear_cross_entropy, vocab_stats
from calibjax.losses import long_horizon
from calibjax.losses.long_horizon import MODES, BaselineKind, Form, LhtsConfig, Mode, RunningMean
from calibjax.models import LanguageModel, decoder
from calibjax.models.config import DecoderConfig
from calibjax.models.generate import log_probs, mix_samples
from calibjax.runtime.arrays import ceil_div
from calibjax.runtime.checksums import array_hash
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import INT_MAX, Count, NonNegative, Positive, Range, Weight, check_value
from calibjax.runtime.sharding import param_shardings, replicated
from calibjax.train.step import Schedule
from calibjax.train.tuning import TuningOptions, batch_states, check_dense, over_vocabulary, tune

Method = Literal["lhts", "partition"]
_CONDITION_RATE = 30.0  # a condition vector's learning rate / the weights', when the embedding's RMS is 1
_BLOCK_LOGITS = 2**24  # float32 logits of each model that KL(q ‖ p) stores at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class LhtsOptions(TuningOptions):
    """Options of Long Horizon Temperature Scaling.

    Attributes:
        temperatures: long-horizon temperatures T > 0. One student learns several: each has a vector that is added to
            the embeddings, and every sequence is trained on at one of them.
        mode: objective, which the options below modify: paper (whole suffix), or authors, that of the authors' code
            (8 tokens, clipped, next token, KL term, equal weight for every sequence).
        horizon: length in tokens of the suffix whose likelihood gives the weight.
        clip: largest log-weight; inf: none.
        baseline: subtracted from log-likelihoods: none, or a running mean, scalar or for each position.
        form: whether a weight applies to the whole suffix or to its first token.
        kl_weight: weight of KL(student ‖ scorer).
        sampled_fraction: fraction of the sequences that the model continues from their first tokens; 0: corpus only.
        prompt_tokens: number of first tokens of a sequence that a sample continues.
        quantiles: number of likelihood groups of the baseline `partition`, the best of which is used.
        partition_rounds: rounds of `partition`; from the second on, text of the last student is added to the data.
        epochs: passes over the sequences.
        learning_rate: peak learning rate; by default 1e-4.
        schedule: constant, as in the authors' code; linear or cosine decay to 0.
    """

    default_rate: ClassVar[float] = 1e-4
    temperatures: tuple[Positive, ...] = (0.9,)
    mode: Mode = "authors"
    horizon: Count | None = None
    clip: Annotated[float, Range(infinite=True)] | None = None
    baseline: BaselineKind | None = None
    form: Form | None = None
    kl_weight: NonNegative | None = None
    sampled_fraction: Weight = 0.0
    prompt_tokens: Count = 1
    quantiles: Annotated[int, Range(2, INT_MAX)] = 5
    partition_rounds: Count = 1
    epochs: Count = 1
    schedule: Schedule = "constant"

    def check(self, mesh: Mesh) -> None:
        super().check(mesh)
        distinct = {f"{temperature:g}" for temperature in self.temperatures}
        if not distinct or len(distinct) < len(self.temperatures):
            raise UserError(f"temperatures: expected at least one, and each once, got {[*self.temperatures]}.")

    @classmethod
    def unset_value(cls, name: str) -> Any:
        """The default mode's value of an option that is None; None if the mode has none."""
        return getattr(MODES["authors"], name, None)

    def num_conditions(self, method: Method) -> int:
        """The number of vectors that one student learns: of quantiles, or of temperatures."""
        return self.quantiles if method == "partition" else len(self.temperatures)

    @property
    def objective(self) -> LhtsConfig:
        """The objective of the mode, with the given options replaced."""
        values = {name: getattr(self, name) for name in ("horizon", "clip", "baseline", "form", "kl_weight")}
        given = {name: x for name, x in values.items() if x is not None}
        return dataclasses.replace(MODES[self.mode], **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LhtsObjective:
    """The `CarryingObjective` of LHTS: the student's weighted likelihood, and running means of the scorer's. Hashable.

    A batch holds the inputs of a decoder, `temperature` [B] and, if the parameters hold a table `condition` [K, D], its
    row for each sequence, `condition` [B]. The table is multiplied by `condition_scale`: these vectors need
    larger steps than weights. In the next-token form a temperature of 1 gives plain likelihood, as for `partition`.
    """

    model: DecoderConfig
    objective: LhtsConfig
    condition_scale: float = 1.0
    dtype: DTypeLike = jnp.float32
    remat: decoder.Remat = "none"

    def __call__(
        self, params: Any, frozen: Any, batch: Mapping[str, Array], hyper: Mapping[str, Array], carry: RunningMean
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], RunningMean]]:
        where, segment_ids = batch["where"], batch["segment_ids"]
        scored = jax.lax.stop_gradient(self._hidden(frozen, batch))
        statistics = ("log_normalizer", "target_logit")
        stats = over_vocabulary(vocab_stats, self.model, frozen, scored, batch, statistics=statistics)
        log_p = stats.log_prob()
        carry = carry.update(log_p, where)
        baseline = carry.baseline(self.objective.baseline)
        weights = long_horizon.token_weights(
            log_p, batch["temperature"], self.objective, baseline=baseline, where=where, segment_ids=segment_ids
        )
        hidden = self._hidden(params, batch)
        kl = self._kl(params, frozen, hidden, scored) if self.objective.kl_weight else None
        log_q = -over_vocabulary(linear_cross_entropy, self.model, params, hidden, batch)
        loss = long_horizon.long_horizon_loss(log_q, weights, kl=kl, kl_weight=self.objective.kl_weight, where=where)
        if self.objective.average == "sequence":
            weight = long_horizon.sequence_weights(where, segment_ids)
            return jnp.sum(weight * loss), (jnp.sum(weight), carry)
        return jnp.sum(loss), (jnp.sum(where).astype(jnp.float32), carry)

    def nll(self, params: Any, frozen: Any, batch: Mapping[str, Array], hyper: Mapping[str, Array]):
        """The `Objective` that evaluates the student: its negative log-likelihood."""
        where = batch["where"]
        nll = over_vocabulary(linear_cross_entropy, self.model, params, self._hidden(params, batch), batch)
        return jnp.sum(jnp.where(where, nll, 0.0)), jnp.sum(where).astype(jnp.float32)

    def _hidden(self, params: Any, batch: Mapping[str, Array]) -> Float[Array, "B T D"]:
        condition = None
        if "condition" in params:
            condition = self.condition_scale * params["condition"][batch["condition"]]
        return batch_states(self.model, params, batch, dtype=self.dtype, remat=self.remat, condition=condition)

    def _kl(self, params: Any, frozen: Any, hidden: Array, scored: Array) -> Float[Array, "B T"]:
        """KL(q ‖ p) of every position, in blocks of positions, so that logits are stored for one block only."""
        rows, length, _ = hidden.shape
        block = max(1, min(length, _BLOCK_LOGITS // (rows * self.model.vocab_size)))
        blocks = ceil_div(length, block)

        def to_blocks(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, blocks * block - length), (0, 0)))
            return jnp.moveaxis(x.reshape(rows, blocks, block, x.shape[-1]), 1, 0)

        @jax.checkpoint
        def block_kl(parts: tuple[Array, Array]) -> Array:
            student = decoder.unembed(self.model, params, parts[0])
            scorer = jax.lax.stop_gradient(decoder.unembed(self.model, frozen, parts[1]))
            return long_horizon.reverse_kl(student, scorer)

        kl = jax.lax.map(block_kl, (to_blocks(hidden), to_blocks(scored)))
        return jnp.moveaxis(kl, 0, 1).reshape(rows, blocks * block)[:, :length]


def conditioned(params: decoder.Params, index: int, scale: float = 1.0) -> dict[str, Any]:
    """The plain decoder of one condition: `scale` times its vector is added to every row of the embedding.

    With tied embeddings this adds the same constant to all logits of a position, which changes no probability.
    """
    plain = {name: value for name, value in params.items() if name != "condition"}
    if "condition" in params:
        plain["embedding"] = plain["embedding"] + scale * params["condition"][index][None, :]
    return plain


def likelihood_quantiles(mean_log_p: Float[np.ndarray, " S"], count: int) -> Int[np.ndarray, " S"]:
    """The group of each sequence, 0 (least likely) to count − 1; group sizes differ by at most 1."""
    rank = np.argsort(np.argsort(mean_log_p, kind="stable"), kind="stable")
    return (rank * count // len(mean_log_p)).astype(np.int32)


class LhtsFit(NamedTuple):
    """Result of `fit_lhts`.

    Attributes:
        params: name -> parameters of a plain decoder, float32: `lhts-T0.9` for each temperature, or `partition`;
            `lm.with_params(params[name])` is the model.
        report: JSON-able: options, steps, and the likelihood on the validation sequences.
    """

    params: dict[str, decoder.Params]
    report: dict[str, Any]


def fit_lhts(
    lm: LanguageModel,
    data: Sequences | Source,
    options: LhtsOptions = LhtsOptions(),
    context: RunContext | None = None,
    *,
    method: Method = "lhts",
    samples_directory: Path | None = None,
) -> LhtsFit:
    """Trains a student at long-horizon temperatures of a model; the model itself is the frozen scorer.

    The baseline `partition` sorts the sequences into quantiles of their mean log-likelihood under the scorer and trains
    the student on all of them, with a vector per quantile that is added to the embeddings; that of the most likely
    quantile is used. With several rounds (Quark, arXiv 2205.13636, which prepends a control token and continues with
    the same student), it then continues the first tokens of all sequences, and the next student learns this text too.

    With a directory in `context`, a killed run that is started again resumes, and ends with bit-identical parameters.

    Args:
        lm: scorer and initial student; `lm.dtype` is the compute dtype.
        data: training sequences, or what `load_text` takes. A part, chosen by the seed, is held out for validation.
        options: see `LhtsOptions`.
        context: directory, devices, log and progress; its seed determines samples, temperatures, order and validation.
        method: `lhts` or `partition`.
        samples_directory: directory of the sampled text, which several fits can share; default: `context.directory`.

    Raises:
        UserError: inconsistent options, no valid token, or a directory that holds another run.
        NonFiniteLossError: training diverged.

    Example:
        >>> import calibjax
        >>> lm = calibjax.LanguageModel.random(vocab_size=32)
        >>> texts = [[(row + step) % 32 for step in range(20)] for row in range(40)]
        >>> data = calibjax.load_text(texts, lm, seq_len=16)
        >>> options = calibjax.LhtsOptions(temperatures=(0.8,), batch_size=8)
        >>> fitted = calibjax.fit_lhts(lm, data, options, calibjax.RunContext().silent())
        >>> list(fitted.params)
        ['lhts-T0.8']
    """
    context = context or RunContext()
    options.check(context.mesh)
    check_dense(lm.config, "choose a dense model")
    check_value("method", Method, method)
    data = as_sequences(data, lm)
    check_ids(data, lm.config.vocab_size)
    num_conditions = options.num_conditions(method)
    if num_conditions > 1 and lm.config.tie_embeddings and lm.config.logit_softcap is not None:
        expected = "a model without a soft-cap or with untied embeddings"
        reason = "for this one, a vector added to the embeddings changes probabilities. Train one temperature at a time"
        raise UserError(f"{num_conditions} conditions of one student: expected {expected}; {reason}.")
    with context.with_directory() as context:
        directory = samples_directory or context.require_directory()
        sampling = {"prompt_tokens": options.prompt_tokens, "batch_size": options.batch_size}
        data = mix_samples(lm, data, options.sampled_fraction, directory=directory, context=context, **sampling)
        if method == "partition":
            return _fit_partition(lm, data, options, context)
        # Each sequence has one of the long-horizon temperatures, in equal numbers.
        order = np.random.default_rng([context.seed, 1]).permutation(len(data.tokens)).astype(np.int32)
        condition = order % np.int32(num_conditions)
        per_sequence: dict[str, np.ndarray] = {"temperature": np.asarray(options.temperatures, np.float32)[condition]}
        if num_conditions > 1:
            per_sequence["condition"] = condition
        params, scale, report = _fit_student(lm, options.objective, per_sequence, data, options, context, method)
    names = [f"lhts-T{temperature:g}" for temperature in options.temperatures]
    return LhtsFit({name: conditioned(params, index, scale) for index, name in enumerate(names)}, report)


def _fit_partition(lm: LanguageModel, sequences: Sequences, options: LhtsOptions, context: RunContext) -> LhtsFit:
    """The baseline; its report has the mean log-likelihood under the scorer of the text of every round."""
    objective = LhtsConfig(form="next_token", kl_weight=options.objective.kl_weight)
    pool = new_text = sequences
    params = lm.params
    sampling = {"prompt_tokens": options.prompt_tokens, "batch_size": options.batch_size}
    means = []
    for number in range(1, options.partition_rounds + 1):
        round_context = context if number == 1 else context.within(f"round-{number}")
        if number > 1:
            last = lm.with_params(params)
            directory = round_context.require_directory()
            new_text = mix_samples(last, sequences, 1.0, directory=directory, context=round_context, **sampling)
            pool = Sequences(*map(np.concatenate, zip(pool, new_text, strict=True)))
        means.append(float(_mean_log_probs(lm, new_text, options).mean()))
        context.log(f"partition, round {number}: text of {means[-1]:.4f} nats per token under the scorer")
        condition = likelihood_quantiles(_mean_log_probs(lm, pool, options), options.quantiles)
        per_sequence = {"temperature": np.ones(len(condition), np.float32), "condition": condition}
        student, scale, report = _fit_student(lm, objective, per_sequence, pool, options, round_context, "partition")
        params = conditioned(student, options.quantiles - 1, scale)
    return LhtsFit({"partition": params}, {**report, "mean_log_prob": means})


def _mean_log_probs(lm: LanguageModel, sequences: Sequences, options: LhtsOptions) -> Float[np.ndarray, " S"]:
    tokens = np.maximum(sequences.where.sum(axis=1), 1)
    return log_probs(lm, sequences, batch_size=options.batch_size).sum(axis=1) / tokens


def _fit_student(
    lm: LanguageModel,
    objective: LhtsConfig,
    per_sequence: Mapping[str, np.ndarray],
    sequences: Sequences,
    options: LhtsOptions,
    context: RunContext,
    method: Method,
) -> tuple[Any, float, dict[str, Any]]:
    """Parameters of a student, with a table of conditions where `per_sequence` has them; its scale; and the report."""
    mesh = context.mesh
    placed = jax.device_put(lm.params, param_shardings(mesh, lm.params))
    student = dict(placed)
    if "condition" in per_sequence:
        table = jnp.zeros((options.num_conditions(method), lm.config.hidden_size))
        student["condition"] = jax.device_put(table, replicated(mesh))
    embedding = lm.params["embedding"].astype(jnp.float32)
    scale = _CONDITION_RATE * float(jnp.sqrt(jnp.mean(jnp.square(embedding))))
    trained = LhtsObjective(
        model=lm.config, objective=objective, condition_scale=scale, dtype=lm.dtype, remat=options.remat
    )
    identity = {"method": method, "fingerprint": lm.fingerprint, "dtype": str(lm.dtype)}
    identity["sequences"] = array_hash({**sequences.arrays(), **per_sequence})
    params, report = tune(
        trained,
        trained.nll,
        lambda: student,
        placed,
        sequences,
        options,
        per_sequence=per_sequence,
        context=context.titled(method),
        identity=identity,
        carry=RunningMean.empty(sequences.tokens.shape[1]),
    )
    report = {"options": report["options"], "objective": dataclasses.asdict(objective), **report}
    return params, scale, report
