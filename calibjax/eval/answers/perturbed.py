"""How stable the distribution of an answer's token is where the hidden state that predicts it is perturbed (CCPS).

Khanmohammadi et al. 2025, arXiv 2505.21772: the final hidden state is moved in the direction in which the token becomes
unlikely fastest; an answer that the model has reason to give holds on for longer.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_STEPS, _REACH = 5, 0.25
Logits = Callable[[Float[Array, "*B D"]], Float[Array, "*B V"]]
"""From hidden states after the final norm to logits, float32."""


def perturbed_features(hidden: Float[Array, "B D"], tokens: Int[Array, " B"], logits: Logits) -> Float[Array, "B 71"]:
    """71 features of the distribution of a token, and of what perturbations of the hidden state do to it.

    With z(h) the logits, p = softmax z(h), t the token, g = −∇_h log p_t and u = g/‖g‖, the states are h_0 = h and
    h_k = h + r_k u, r_k = k/5 · ‖h‖/4, k = 1, ..., 5; z_k and p_k are theirs. In this order:

    - 8 of h_0: log p_t, p_t, z_t, max p, max z, the entropy of p, the largest logit less the second, ‖z‖;
    - 4 of h_0: the largest probability less the second, the standard deviation of z, ‖h‖, whether t is the argmax;
    - ‖g‖; the smallest k/5 at which the argmax is another one, 6/5 if it never is; and the area (1/5) Σ_k (f_{k−1} +
      f_k)/2 under the fall f_k = max(log p_{0,t} − log p_{k,t}, 0), their "perturbation energy";
    - mean, standard deviation, minimum and maximum over k = 1, ..., 5 of each of 14: the first eight for h_k;
      log p_{0,t} − log p_{k,t}; whether the argmax changed; KL(p_0‖p_k); the Jensen-Shannon divergence of p_0 and p_k;
      the cosines of z_0 with z_k and of h with h_k.

    The paper's radii go to 20, whatever the model; here to a quarter of ‖h‖, which has a meaning in any width. Its 75
    features have the distance ‖h_k − h‖ too, which is r_k.

    Args:
        hidden: the states after the final norm that predict the tokens, float32.
        tokens: of the answer, in [0, V).
        logits: V is at least 2. Memory is that of 6 B V logits.

    Returns:
        float32 `[B, 71]`, finite.
    """
    rows = jnp.arange(len(tokens))

    def surprise(states: Array) -> Array:
        return -jnp.sum(jax.nn.log_softmax(logits(states))[rows, tokens])

    gradient = jax.grad(surprise)(hidden)
    length, size = (jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (gradient, hidden))
    unit = gradient / jnp.where(length > 0, length, 1.0)
    fractions = jnp.arange(1, _STEPS + 1, dtype=jnp.float32) / _STEPS
    moved = hidden[None] + fractions[:, None, None] * (_REACH * size * unit)[None]
    z, z_k = logits(hidden), logits(moved)
    log_p, log_p_k = jax.nn.log_softmax(z), jax.nn.log_softmax(z_k)
    first, each = _of_state(z, log_p, tokens), _of_state(z_k, log_p_k, tokens)
    p, top = jnp.exp(log_p), jnp.argmax(z, axis=-1)
    two = jax.lax.top_k(p, 2)[0]
    own = [two[:, 0] - two[:, 1], jnp.std(z, axis=-1), size[:, 0], (top == tokens).astype(jnp.float32)]
    fall = first[0][None] - each[0]
    changed = jnp.argmax(z_k, axis=-1) != top[None]
    flip = jnp.min(jnp.where(changed, fractions[:, None], (_STEPS + 1) / _STEPS), axis=0)
    falls = jnp.concatenate([jnp.zeros_like(fall[:1]), jnp.maximum(fall, 0.0)])
    energy = jnp.mean((falls[:-1] + falls[1:]) / 2, axis=0)
    mixed = jnp.logaddexp(log_p[None], log_p_k) - jnp.log(2.0)
    shannon = (_divergence(log_p[None], mixed) + _divergence(log_p_k, mixed)) / 2
    divergences = _divergence(log_p[None], log_p_k), shannon
    cosines = _cosine(z[None], z_k), _cosine(hidden[None], moved)
    over = jnp.stack([*each, fall, changed.astype(jnp.float32), *divergences, *cosines])
    ways = (jnp.mean, jnp.std, jnp.min, jnp.max)
    summaries = [way(values, axis=0) for values in over for way in ways]
    return jnp.stack([*first, *own, length[:, 0], flip, energy, *summaries], axis=-1)


def _of_state(z: Float[Array, "*K B V"], log_p: Float[Array, "*K B V"], tokens: Int[Array, " B"]) -> list[Array]:
    """log p_t, p_t, z_t, max p, max z, entropy, margin of the logits, and their norm; `[*K, B]` each."""

    def of_token(values: Array) -> Array:
        return values[..., jnp.arange(len(tokens)), tokens]

    two = jax.lax.top_k(z, 2)[0]
    log_p_t, z_t = of_token(log_p), of_token(z)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    largest = jnp.exp(jnp.max(log_p, axis=-1))
    return [
        *(log_p_t, jnp.exp(log_p_t), z_t, largest, two[..., 0], entropy),
        *(two[..., 0] - two[..., 1], jnp.linalg.norm(z, axis=-1)),
    ]


def _divergence(log_p: Float[Array, "_ B V"], log_q: Float[Array, "K B V"]) -> Float[Array, "K B"]:
    """KL(p‖q)."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _cosine(a: Float[Array, "1 B D"], b: Float[Array, "K B D"]) -> Float[Array, "K B"]:
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.sum(a * b, axis=-1) / jnp.where(lengths > 0, lengths, 1.0)
