"""Supervised fine-tuning with label smoothing (arXiv 2508.00264), of all weights or of low-rank adapters."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from calibjax.data import Sequences, check_ids
from calibjax.data.load import Source, as_sequences
from calibjax.kernels import linear_cross_entropy
from calibjax.losses import LOSSES, linear_loss
from calibjax.models import LanguageModel, decoder
from calibjax.models.config import DecoderConfig
from calibjax.models.lora import LoraConfig
from calibjax.runtime.checksums import array_hash
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import Count, NonNegative, OneOf, Positive, Weight
from calibjax.runtime.sharding import AnyMesh, param_shardings
from calibjax.train.options import checked_alpha
from calibjax.train.tuning import TuningOptions, batch_states, check_dense, over_vocabulary, tune


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftOptions(TuningOptions):
    """Options of supervised fine-tuning.

    Attributes:
        loss: name of a loss; the docstrings of calibjax.losses have the formulas.
        alpha: main weight of the loss, as in `train ats --alpha`; for label-smoothing use --label-smoothing.
        label_smoothing: weight of the uniform distribution in the target, 0 to 1.
        z_loss: weight of the squared log-normaliser; 1e-4 keeps logits from drifting.
        temperature: of the loss: logits are divided by it in training; the trained model is used at 1.
        softcap: logits become softcap * tanh(logits / softcap), in training and evaluation; by default as the model's.
            The saved model has it where the configuration of its family can (Gemma 2 and 3).
        reduction: mean over the tokens of a batch, or their sum.
        lora_rank: train low-rank adapters of this rank instead of the weights.
        lora_alpha: adapters are weighted by lora_alpha / lora_rank.
        lora_targets: kernels with an adapter: all kernels of a block, or those of attention or of the MLP.
        learning_rate: peak learning rate; by default 2e-5, and 2e-4 for adapters.
    """

    loss: Annotated[str, OneOf(LOSSES)] = "label-smoothing"
    alpha: NonNegative | None = None
    label_smoothing: Weight = 0.1
    z_loss: NonNegative = 0.0
    temperature: Positive = 1.0
    softcap: Positive | None = None
    reduction: Literal["mean", "sum"] = "mean"
    lora_rank: Count | None = None
    lora_alpha: Positive = 32.0
    lora_targets: Literal["all", "attention", "mlp"] = "all"
    learning_rate: Positive | None = None

    def check(self, mesh: AnyMesh) -> None:
        super().check(mesh)
        checked_alpha(self.loss, self.alpha)
        adapters = (self.lora_alpha, self.lora_targets)
        if self.lora_rank is None and adapters != (SftOptions.lora_alpha, SftOptions.lora_targets):
            raise UserError("lora_alpha, lora_targets: they are options of adapters; give lora_rank too.")
        if self.loss == "label-smoothing":
            if self.alpha is not None:
                raise UserError("alpha: the weight of loss label-smoothing is label_smoothing; leave it out.")
            return
        if self.label_smoothing != SftOptions.label_smoothing:
            raise UserError(f"label_smoothing: loss {self.loss} has none; leave it out.")
        if self.z_loss and self.loss != "cross-entropy":
            hint = "it goes with label-smoothing and cross-entropy"
            raise UserError(f"z_loss: expected 0 with loss {self.loss}, got {self.z_loss}; {hint}.")
        if LOSSES[self.loss].per_micro_batch:
            raise UserError(f"loss={self.loss}: it is for temperature heads (train ats) only; choose another loss.")
        if LOSSES[self.loss].top_k and mesh.size > 1:
            raise UserError(f"loss={self.loss}: it has no sharded form; choose another loss, or one device.")

    def check_model(self, config: DecoderConfig) -> None:
        """Raises `UserError` if these weights of such a model cannot be trained."""
        if self.lora is None:
            check_dense(config, "train adapters of its attention: --lora-rank 16 --lora-targets attention")
        else:
            self.lora.check(config)

    @property
    def lora(self) -> LoraConfig | None:
        if self.lora_rank is None:
            return None
        return LoraConfig(rank=self.lora_rank, alpha=self.lora_alpha, targets=self.lora_targets)

    @property
    def rate(self) -> float:
        return self.learning_rate or (2e-5 if self.lora_rank is None else 2e-4)

    def configure(self, config: DecoderConfig) -> DecoderConfig:
        """The configuration to train: the model's own, with the soft-cap of the options."""
        return config if self.softcap is None else dataclasses.replace(config, logit_softcap=self.softcap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftObjective:
    """The `Objective` of fine-tuning: `linear_cross_entropy` of the decoder's hidden states. Hashable.

    It trains the decoder's parameters, or adapters of a frozen decoder, without storing logits, on the current mesh
    (`jax.set_mesh`). With label smoothing β, the loss of a token with logits z/T is
    (1−β)(−log p_y) + β(−(1/V) Σ_v log p_v) + z_loss·lse² (arXiv 2508.00264, section 3); others: `losses.LOSSES` of z/T.

    Attributes:
        model: as `options.configure` returns it.
    """

    model: DecoderConfig
    options: SftOptions = SftOptions()
    dtype: DTypeLike = jnp.float32

    def __call__(
        self, params: Any, frozen: Any, batch: Mapping[str, Array], hyper: Mapping[str, Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        options = self.options
        lora = options.lora
        if lora is not None:
            # Adapters are float32; their products are added to those of the kernels, in the compute dtype.
            params = lora.join(frozen, jax.tree.map(lambda x: x.astype(self.dtype), params))
        hidden = batch_states(self.model, params, batch, dtype=self.dtype, remat=options.remat, lora=lora)
        inputs = (self.model, params, hidden, batch)
        scale = None if options.temperature == 1 else 1 / options.temperature
        if options.loss in ("label-smoothing", "cross-entropy"):
            beta = options.label_smoothing if options.loss == "label-smoothing" else 0.0
            loss = functools.partial(linear_cross_entropy, label_smoothing=beta, z_loss=options.z_loss, reduction="sum")
            total = over_vocabulary(loss, *inputs, scale=scale)
        else:
            loss = functools.partial(linear_loss, LOSSES[options.loss])
            weight = {} if options.alpha is None else {"alpha": options.alpha}
            values, _ = over_vocabulary(loss, *inputs, scale=scale, hyper=weight)
            total = jnp.sum(values)
        return total, jnp.sum(batch["where"]).astype(jnp.float32)

    def nll_objective(self) -> "SftObjective":
        """The objective that evaluates the same model by its negative log-likelihood."""
        nll_options = dataclasses.replace(
            self.options, loss="cross-entropy", alpha=None, z_loss=0.0, temperature=1.0, remat="none"
        )
        return dataclasses.replace(self, options=nll_options)


class SftFit(NamedTuple):
    """Result of `fit_sft`.

    Attributes:
        config: configuration of the model, with the soft-cap that it was trained with.
        params: float32, or for adapters, which are merged, in the dtype of the frozen weights;
            `lm.with_params(params, config)` is the fine-tuned model.
        report: JSON-able: options, steps, and the likelihood on the validation sequences.
    """

    config: DecoderConfig
    params: decoder.Params
    report: dict[str, Any]


def fit_sft(
    lm: LanguageModel,
    data: Sequences | Source,
    options: SftOptions = SftOptions(),
    context: RunContext | None = None,
    *,
    donate: bool = False,
) -> SftFit:
    """Fine-tunes a model, or adapters in it, on sequences of tokens.

    With a directory in `context`, a killed run that is started again with the same arguments resumes and ends with
    bit-identical parameters. Weights are trained in float32.

    Args:
        lm: the initial model; `lm.dtype` is the compute dtype. For full fine-tuning, load its weights in float32.
        data: training sequences, or what `load_text` takes. A part, chosen by the seed, is held out for validation.
        options: see `SftOptions`.
        context: directory for checkpoints and logs, devices, log and progress; its seed determines the initial
            adapters, the order of the sequences and the validation part.
        donate: donate the weights of `lm` instead of copying them; `lm` cannot be used afterwards.

    Raises:
        UserError: inconsistent options, or a directory that holds another run.
        NonFiniteLossError: training diverged.

    Example:
        >>> import calibjax
        >>> lm = calibjax.LanguageModel.random(vocab_size=32)
        >>> texts = [[(row + step) % 32 for step in range(20)] for row in range(40)]
        >>> data = calibjax.load_text(texts, lm, seq_len=16)
        >>> options = calibjax.SftOptions(label_smoothing=0.1, learning_rate=1e-2, batch_size=8, epochs=1)
        >>> fitted = calibjax.fit_sft(lm, data, options, calibjax.RunContext().silent())
        >>> tuned = lm.with_params(fitted.params, fitted.config)
        >>> list(calibjax.evaluate(tuned, data, context=calibjax.RunContext().silent()).results)
        ['uncalibrated']
    """
    context = context or RunContext()
    mesh = context.mesh
    options.check(mesh)
    options.check_model(lm.config)
    data = as_sequences(data, lm)
    check_ids(data, lm.config.vocab_size)
    config = options.configure(lm.config)
    lora = options.lora
    objective = SftObjective(model=config, options=options, dtype=lm.dtype)
    place = functools.partial(jax.device_put, lm.params, param_shardings(mesh, lm.params))
    if lora is None:
        frozen = None
        initial_params = place
    else:
        frozen = place()
        initial_params = functools.partial(decoder.init_adapters, config, lora, jax.random.key(context.seed))
    with context.with_directory() as context:
        params, report = tune(
            objective,
            objective.nll_objective(),
            initial_params,
            frozen,
            data,
            options,
            context=context.titled("fine-tuning"),
            identity={"fingerprint": lm.fingerprint, "dtype": str(lm.dtype), "sequences": array_hash(data._asdict())},
            reduction=options.reduction,
            donate=lora is None and donate,
        )
    if lora is not None:
        # Compiled with the shardings of the result: one by one, the products of adapters are whole on every device.
        params = jax.jit(lora.merge, out_shardings=param_shardings(mesh, frozen))(frozen, params)
    return SftFit(config, params, report)
