"""Exported heads on the JAX models of tpu-inference, by which vLLM serves on TPUs.

    CALIBJAX_HEAD=DIR vllm serve path/to/model --hf-overrides '{"architectures": ["CalibratedLlamaForCausalLM"]}'

The plugin `calibjax.torch.vllm` calls `register` where vLLM runs on TPUs. A name of its own is needed, because
tpu-inference writes its own models over those registered under their names. This module imports JAX, which
tpu-inference brings, and none of calibjax's other requirements.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from calibjax.torch.heads import Export, HeadError, read_export

PREFIX = "Calibrated"
MODELS = {"LlamaForCausalLM": "tpu_inference.models.jax.llama3"}
_FEATURES = {"hidden_states", "logit_statistics", "max_logit", "log_std_logits"}


def register(directory: str | Path) -> None:
    """Registers the models of `MODELS` with this head, under their names with "Calibrated" before them.

    Raises:
        HeadError: another version of tpu-inference, or a head that is none or reads other tokens or the unembedding.
            `load_weights` of the models raises it for another base model.
    """
    try:
        register_model: Any = import_module("tpu_inference.models.common.model_loader").register_model
        bases = {name: getattr(import_module(module), name) for name, module in MODELS.items()}
    except (ImportError, AttributeError) as error:
        raise HeadError(f"tpu-inference: expected register_model and the models of 0.32 ({error}).") from error
    export = read_export(directory)
    for name, base in bases.items():
        register_model(PREFIX + name, _calibrated_model(base, export))


def _calibrated_model(base: type, export: Export) -> type:
    """A subclass of a model, whose `compute_logits` of hidden states `[N, D]` returns s * logits in float32."""
    head, base_model = export.head, export.base
    is_known = head.kind == "constant" or {*head.features} <= _FEATURES
    if head.reads_sequence or head.pooling == "sequence" or not is_known:
        raise HeadError(
            "tpu-inference: expected a linear or an mlp head, pooled by token, of the features "
            f"{', '.join(sorted(_FEATURES))}; this {head.kind} head reads {', '.join(head.features)}."
        )
    if base_model["logit_softcap"] is not None and "log_std_logits" in head.features:
        raise HeadError("tpu-inference: log_std_logits is taken before the model's soft-cap, which it does not show.")
    log_scale, vocab_size = _in_jax(export), base_model["vocab_size"]

    class Calibrated(base):
        def compute_logits(self, hidden_states: Any) -> Any:
            logits = super().compute_logits(hidden_states)
            return _scaled(logits, log_scale(hidden_states, logits[..., :vocab_size]))

        def load_weights(self, *args: Any, **options: Any) -> Any:
            loaded = super().load_weights(*args, **options)
            _check_base(super().compute_logits, export)
            return loaded

    Calibrated.__name__ = Calibrated.__qualname__ = PREFIX + base.__name__
    return Calibrated


def _in_jax(export: Export) -> Callable[[Any, Any], Any]:
    """`TemperatureHead` in JAX: log inverse temperatures `[N]` of hidden states `[N, D]` and logits `[N, V]`."""
    import jax
    import jax.numpy as jnp

    head = export.head
    params = {name: buffer.numpy() for name, buffer in head.named_buffers()}

    def features(hidden: Any, logits: Any) -> Any:
        logits = logits.astype(jnp.float32)
        parts = {
            "hidden_states": lambda: hidden.astype(jnp.float32),
            "logit_statistics": lambda: statistics(logits),
            "max_logit": lambda: logits.max(-1, keepdims=True),
            "log_std_logits": lambda: 0.5 * jnp.log(jnp.maximum(logits.var(-1, ddof=1, keepdims=True), 1e-12)),
        }
        return jnp.concatenate([parts[name]() for name in head.features], axis=-1)

    def statistics(logits: Any) -> Any:
        difference = jnp.maximum(logits - logits.max(-1, keepdims=True), -1e30)
        log_weight = jax.nn.logsumexp(difference, axis=-1)
        p = jnp.exp(difference - log_weight[..., None])
        mean = jnp.sum(p * difference, axis=-1)
        variance = jnp.sum(p * jnp.square(difference - mean[..., None]), axis=-1)
        lowest = jnp.maximum(difference.mean(-1), -1e3)
        return jnp.stack([log_weight, jnp.log1p(jnp.maximum(-mean, 0.0)), jnp.log1p(variance), lowest], axis=-1)

    def dot(x: Any, name: str) -> Any:
        return jnp.matmul(x, params[name], precision=jax.lax.Precision.HIGHEST)

    def log_scale(hidden: Any, logits: Any) -> Any:
        if head.kind == "constant":
            return jnp.broadcast_to(jnp.clip(params["log_scale"], *head.bounds) + head.log_factor, hidden.shape[:-1])
        x = features(hidden, logits)
        if head.kind == "mlp":
            if head.normalize:
                x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
            gate, up = jnp.split(dot(x, "gate_up_kernel"), 2, axis=-1)
            x = jax.nn.silu(gate) * up
        return jnp.clip(dot(x, "output_kernel")[..., 0] + params["output_bias"], *head.bounds) + head.log_factor

    return log_scale


def _scaled(logits: Any, log_scale: Any) -> Any:
    """`scaled_logits` in JAX."""
    import jax.numpy as jnp

    logits = logits.astype(jnp.float32)
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    scaled = jnp.exp(log_scale)[..., None] * logits
    top = jnp.take_along_axis(scaled, best, axis=-1)
    others = jnp.arange(logits.shape[-1]) != best
    return jnp.where(others & (scaled >= top), jnp.nextafter(top, -jnp.inf), scaled)


def _check_base(compute_logits: Callable[[Any], Any], export: Export) -> None:
    """Compares the logits of the probe: from its hidden states to its 16 tokens."""
    import jax
    import jax.numpy as jnp

    hidden, rows = (export.probe[name].double().numpy() for name in ("hidden", "unembedding"))
    tokens, cap = export.probe["tokens"].numpy(), export.base["logit_softcap"]
    expected = hidden @ rows.T / (export.base["logit_divisor"] or 1.0)
    expected = expected if cap is None else cap * np.tanh(expected / cap)
    try:
        with jax.default_matmul_precision("highest"):
            logits = compute_logits(jnp.asarray(hidden, jnp.float32))
    except TypeError as error:  # of a dot product of other sizes
        raise HeadError(f"this head was fitted on a model of hidden size {hidden.shape[1]}.") from error
    limit = 1e-3 if logits.dtype == jnp.float32 else 5e-2
    if not np.linalg.norm(np.asarray(logits, np.float64)[:, tokens] - expected) <= limit * np.linalg.norm(expected):
        raise HeadError("this head was fitted on another base model: its logits differ. Fit a head for this one.")
