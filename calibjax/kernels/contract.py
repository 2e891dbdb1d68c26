"""The contract between the operator and its implementations: what a pass over the vocabulary receives and returns.

z = softcap(h Wᵀ + b), p = softmax(s·z), c_v = 1 − (z_v/cap)² (1 without a soft-cap).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels.platforms import Platform
from calibjax.kernels.stats import Moments


class Options(NamedTuple):
    """Static options of both passes; see `vocab_stats`.

    With `scales`, K that all tokens have, `weight`, `first` and `second` of `Moments` are [N, K], and there is no
    backward pass.
    """

    softcap: float | None = None
    precision: jax.lax.PrecisionLike = None
    chunk_size: int | None = None
    save_logits: bool = False
    scales: tuple[float, ...] | None = None

    def scale(self, inputs: "Inputs") -> Array:
        """The s of the sums over the vocabulary: [N], or [1, K] where all tokens have the same scales."""
        return inputs.scale if self.scales is None else jnp.asarray(self.scales, jnp.float32)[None, :]


class Inputs(NamedTuple):
    """N tokens and the unembedding that scores them. In `Implementation.check` all are `jax.ShapeDtypeStruct`.

    Attributes:
        hidden: [N, D].
        unembedding: [V, D], of the dtype of `hidden`.
        bias: float32 [V] or None.
        scale: float32 [N], s.
        targets: int32 [N] or None. Those outside [0, V) match nothing.
        valid: bool [N], False for tokens that do not count, whose hidden states may hold anything; None: all count.
    """

    hidden: Array
    unembedding: Array
    bias: Array | None
    scale: Array
    targets: Array | None
    valid: Array | None

    def masked(self) -> "Inputs":
        """The same with hidden states of 0 where a token does not count."""
        if self.valid is None:
            return self
        return self._replace(hidden=jnp.where(self.valid[:, None], self.hidden, 0))


class Cotangents(NamedTuple):
    """Coefficients of the cotangent of h Wᵀ + b, one row of V for each token; None is zero:

        c_v (p_v (softmax + centred (z_v − E)) + uniform) + Σ_k [v = ids_k] g_k,   p_v = exp(s z_v − log_normalizer).

    Attributes:
        log_normalizer: float32 [N], of the whole vocabulary; inf for invalid tokens, so that p = 0.
        softmax, centred, uniform: float32 [N].
        expected_logit: float32 [N], E = E_p[z]; given with `centred`.
        one_hots: pairs of ids int32 [N] and g float32 [N], which includes c_v; ids outside [0, V) match nothing.
        rows: as the implementation's forward pass returned it: `Moments.rows` [N, D] of the whole vocabulary, or of
            `sharded` a term of each shard, with an axis of devices in front. If given, the softmax part of dh is
            `softmax`·`rows`, except for the target's, which is in `one_hots`.
    """

    log_normalizer: Array
    softmax: Array | None
    centred: Array | None
    expected_logit: Array | None
    uniform: Array | None
    one_hots: tuple[tuple[Array, Array], ...]
    rows: Array | None = None

    def hidden_is_closed(self, options: Options) -> bool:
        """dh needs no logits: the softmax part is absent or known, and the uniform part has no factor c_v."""
        known = self.rows is not None or self.softmax is None
        return known and self.centred is None and (self.uniform is None or options.softcap is None)


class Gradients(NamedTuple):
    """Gradients in float32 or the dtype of the array they belong to; those not wanted are None."""

    hidden: Array | None = None
    unembedding: Array | None = None
    bias: Array | None = None


class Implementation(NamedTuple):
    """Two passes over the vocabulary.

    Attributes:
        forward: `(options, needed, save, inputs) -> (moments, saved)`. The moments are those of the whole vocabulary,
            of invalid tokens any value; `needed` names their optional fields. `saved` is None, or with `save` what
            `backward` uses instead of computing the logits again.
        backward: `(options, wanted, inputs, cotangents, saved, into) -> Gradients`, those that `wanted` names. Invalid
            tokens add nothing, even with NaN in `hidden`. `into`, for implementations with `accumulates`: None, or
            float32 gradients in unembedding and bias from other tokens, to which those of these tokens are added.
        check: `(options, inputs, platform)` -> how a call runs, for `explain`; raises NotImplementedError with the
            reason if it cannot run.
        rows_first: where hidden and unembedding are both differentiated and no logits are saved, the gradient in hidden
            comes out of the forward pass too, and only that in the unembedding is left to the backward pass.
        shares_logits: where both gradients are left to the backward pass, whether it computes the logits once for both;
            for `explain`.
        saved_bytes: size of `saved` per logit, from the bytes of a hidden state's number.
        accumulates: `backward` takes `into`.
    """

    forward: Callable[..., tuple[Moments, Any]]
    backward: Callable[..., Gradients]
    check: Callable[[Options, Inputs, Platform], str]
    rows_first: bool = False
    shares_logits: Callable[[Options, Inputs, Platform], bool] = lambda options, inputs, platform: True
    saved_bytes: Callable[[int], float] = lambda itemsize: 4.0
    accumulates: bool = False


def first_order(run: Callable[..., Any], static: int) -> Callable[..., Any]:
    """A pass by kernels that JAX cannot differentiate: one error where a second derivative would need it.

    The first `static` arguments are static; the others are pytrees of arrays.
    """
    checked = jax.custom_jvp(run, nondiff_argnums=tuple(range(static)))

    @checked.defjvp
    def _differentiated(*_: Any) -> Any:
        raise NotImplementedError(
            "second derivatives: the Pallas kernels have a first one only. Pass implementation='chunked'."
        )

    return checked


class Refs(dict[str, Any]):
    """The references of a Pallas kernel by name, as attributes; None where there is none."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)
