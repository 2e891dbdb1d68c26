"""The operator over a mesh: every device takes its part of the tokens and of the vocabulary.

Any implementation runs inside `jax.shard_map` on its device's shard of the unembedding, with targets counted from the
shard's start. W never moves (see `VocabSharding.width`). Communication between S vocabulary shards, for N local tokens:

| pass | collective over the vocabulary axes | bytes a device receives |
|---|---|---|
| forward | all-gathers of the `Moments`, 2 to 6 numbers per token, and of `argmax`, for `stats.merge` | up to 24 N S |
| backward | one psum of dh, where hidden is differentiated | 4 N D |

Where W is frozen, each shard keeps its term of `Moments.expected_row`, and the psum of dh in the backward pass adds it.

dW and db stay where their part of the vocabulary is; over the token axes they are summed once, in float32.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from calibjax.kernels import stats
from calibjax.kernels.contract import Cotangents, Gradients, Implementation, Inputs, Options, padded
from calibjax.kernels.platforms import Platform
from calibjax.kernels.stats import Moments
from calibjax.runtime.arrays import ceil_div, round_up

_GATHERED_BYTES = 16 * 2**20  # of one piece of W gathered along D; two are held at a time
_NARROW = 128  # rows of W under which a piece is not worth a collective


@dataclasses.dataclass(frozen=True)
class VocabSharding:
    """The mesh axes over which tokens, vocabulary and width are split: each field has none, one or several axes.

    Several axes split in the order given. Tokens and vocabulary need not divide: N is padded with tokens that do not
    count, and every device takes the last V mod S rows of W in addition to its V // S rows.

    Attributes:
        mesh: of devices, or abstract. Results over axes of type Explicit are sharded as the hidden states are.
        tokens: axes over which the tokens N are split.
        vocab: axes over which the rows of `unembedding` (and the bias) are split.
        width: axes among `tokens` over which the columns of `unembedding`, its D, are stored split, as in fully
            sharded data parallelism; D must divide. W is gathered along D in pieces of some 16 MiB, each while the
            previous one is in use, and dW is reduced and scattered back in the same pieces: no device holds all of W.

    Raises:
        ValueError: for axes that the mesh does not have, or that have two uses.

    Example:
        >>> import jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
        >>> VocabSharding(mesh).describe(tokens=8, vocab_size=32)
        'tokens over data, fsdp: 1 x 8; vocabulary over tensor: 1 x 32'
    """

    mesh: Mesh | AbstractMesh
    tokens: tuple[str, ...] = ("data", "fsdp")
    vocab: tuple[str, ...] = ("tensor",)
    width: tuple[str, ...] = ()

    def __post_init__(self):
        for field in ("tokens", "vocab", "width"):
            axes = getattr(self, field)
            object.__setattr__(self, field, (axes,) if isinstance(axes, str) else tuple(axes))
        used = self.tokens + self.vocab
        faults = [f"no axis {axis!r}" for axis in used + self.width if axis not in self.mesh.axis_names]
        faults += [f"axis {axis!r} used twice" for axis in sorted(set(used)) if used.count(axis) > 1]
        faults += [f"width axis {axis!r} not among the tokens'" for axis in self.width if axis not in self.tokens]
        faults += [f"width axis {axis!r} used twice" for axis in set(self.width) if self.width.count(axis) > 1]
        if faults:
            raise ValueError(
                f"VocabSharding: {'; '.join(faults)}. Expected axes of the mesh {dict(self.mesh.shape)}, "
                f"each for tokens or for vocab, and width among those for tokens; got {self}."
            )

    @property
    def explicit_axes(self) -> tuple[str, ...]:
        """The axes of the mesh with type Explicit; `in_auto_axes` takes them."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return tuple(axis for axis, kind in types if kind is AxisType.Explicit)

    def without_trivial_axes(self) -> "VocabSharding":
        """The same without axes of one device, over which there is nothing to sum or gather."""

        def nontrivial(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

        return VocabSharding(self.mesh, nontrivial(self.tokens), nontrivial(self.vocab), nontrivial(self.width))

    def count(self, axes: tuple[str, ...]) -> int:
        """The number of shards along these axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def check_shape(self, vocab_size: int, width: int) -> None:
        """Raises ValueError where `unembedding [V, D]` cannot be split like this."""
        shards, columns = self.count(self.vocab), self.count(self.width)
        if vocab_size < shards:
            raise ValueError(f"sharding: V = {vocab_size} rows for {shards} shards over {self.vocab}: use fewer.")
        if width % columns:
            problem = f"D = {width} does not divide into the {columns} shards over {self.width}"
            hint = "pad D of hidden and unembedding with zeros, which change nothing"
            raise ValueError(f"sharding: {problem}: {hint}, or store unembedding whole along D (width=()).")

    def describe(self, tokens: int, vocab_size: int) -> str:
        """The line of `explain` on the sharding of N tokens and V logits."""
        parts = []
        if self.tokens:
            shards = self.count(self.tokens)
            parts.append(f"tokens over {', '.join(self.tokens)}: {shards} x {ceil_div(tokens, shards)}")
        if self.vocab:
            shards = self.count(self.vocab)
            parts.append(f"vocabulary over {', '.join(self.vocab)}: {shards} x {vocab_size // shards}")
        if self.width:
            parts.append(f"D stored over {', '.join(self.width)}")
        return "; ".join(parts)


def in_auto_axes(
    sharding: VocabSharding, function: Callable[[VocabSharding, Any], Any], arrays: Any, leading: tuple[Any, ...]
) -> Any:
    """`function(sharding, arrays)` with the explicit axes of the mesh as axes of type Auto, over which XLA shards.

    The first axes of the results are sharded by `leading`; the axes after them are whole on every device.
    """
    mesh, axes = sharding.mesh, sharding.explicit_axes
    sharding = dataclasses.replace(sharding, mesh=mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names)))
    run = jax.sharding.auto_axes(
        functools.partial(function, sharding), axes=axes, out_sharding=NamedSharding(mesh, P(*leading))
    )
    in_context = jax.sharding.get_abstract_mesh().axis_names
    with contextlib.nullcontext() if in_context else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return run(arrays)


def leading_spec(hidden: Array) -> tuple[Any, ...]:
    """The mesh axes, of type Explicit, over which the axes of `hidden` but for the last are sharded."""
    return tuple(jax.typeof(hidden).sharding.spec)[: hidden.ndim - 1]


def _parts(sharding: VocabSharding, inputs: Inputs) -> list[Inputs]:
    """Shapes of the parts of the vocabulary that a device takes: the main one, and what does not divide, if any."""
    tokens = ceil_div(inputs.hidden.shape[0], sharding.count(sharding.tokens))
    vocab_size, width = inputs.unembedding.shape
    rows_per_shard, rest = divmod(vocab_size, sharding.count(sharding.vocab))

    def part(rows: int) -> Inputs:
        shapes = ((tokens, width), (rows, width), (rows,), (tokens,), (tokens,), (tokens,))
        pairs = zip(inputs, shapes, strict=True)
        return Inputs._make(None if x is None else jax.ShapeDtypeStruct(shape, x.dtype) for x, shape in pairs)

    main = rows_per_shard
    if sharding.width:
        main = _piece_rows(rows_per_shard, width * inputs.unembedding.dtype.itemsize)
    return [part(rows) for rows in (main, rest) if rows]


def _piece_rows(rows: int, row_bytes: int) -> int:
    """Rows of W to gather at a time: they divide `rows`, are as many as the budget allows, and not too few."""
    divisors = [n for n in range(min(_NARROW, rows), rows + 1) if rows % n == 0]
    return max((n for n in divisors if n * row_bytes <= _GATHERED_BYTES), default=divisors[0])


_Tail = dict[str, Any]  # the last rows of "unembedding" and "bias"


def _split_rows(inputs: Inputs, shards: int) -> tuple[Inputs, _Tail | None]:
    """The rows of W and the bias that divide into the shards, and the few after them, None where all divide."""
    vocab_size = inputs.unembedding.shape[0]
    cut = vocab_size // shards * shards
    if cut == vocab_size:
        return inputs, None
    weights = {"unembedding": inputs.unembedding, "bias": inputs.bias}  # the bias may be None, an empty tree
    main = inputs._replace(**jax.tree.map(lambda x: x[:cut], weights))
    return main, jax.tree.map(lambda x: x[cut:], weights)


def _input_specs(sharding: VocabSharding) -> Any:
    tokens: Any = P(sharding.tokens)
    weights: Any = P(sharding.vocab, sharding.width)
    return Inputs(tokens, weights, bias=P(sharding.vocab), scale=tokens, targets=tokens, valid=tokens)  # pyright: ignore


_Step = Callable[[Any, Inputs, Array | int, Any], tuple[Any, Any]]


def _over_pieces(sharding: VocabSharding, inputs: Inputs, step: _Step, carry: Any, saved: Any = None) -> Any:
    """`step(carry, part, start, saved) -> (carry, output)` over the rows of W that this device takes.

    `part` has some of the rows and all D columns; `start` is where it starts in the vocabulary. Without width axes the
    whole shard is one piece. `saved` and the outputs have an axis in front, one entry a piece.
    """
    rows = inputs.unembedding.shape[0]
    start = jax.lax.axis_index(sharding.vocab) * rows if sharding.vocab else 0
    if sharding.width:
        return _over_gathered_pieces(sharding, inputs, step, carry, saved, start)
    carry, output = step(carry, inputs, start, jax.tree.map(lambda x: x[0], saved))
    return carry, jax.tree.map(lambda x: x[None], output)


def _over_gathered_pieces(
    sharding: VocabSharding, inputs: Inputs, step: _Step, carry: Any, saved: Any, first: Array | int
) -> tuple[Any, Any]:
    """`_over_pieces` that are gathered over the width axes, each while the piece before it is computed with.

    The last iteration gathers the first piece again, for nothing, so that all pieces have one program.
    """
    rows, columns_here = inputs.unembedding.shape
    columns = sharding.count(sharding.width) * columns_here
    size = _piece_rows(rows, columns * inputs.unembedding.dtype.itemsize)

    def gather(start: Array | int) -> Array:
        mine = jax.lax.dynamic_slice_in_dim(inputs.unembedding, start, size)
        return jax.lax.all_gather(mine, sharding.width, axis=1, tiled=True)

    def iterate(state, x):
        carry, weights = state
        start, saved = x
        following = gather((start + size) % rows)
        bias = None if inputs.bias is None else jax.lax.dynamic_slice_in_dim(inputs.bias, start, size)
        carry, output = step(carry, inputs._replace(unembedding=weights, bias=bias), first + start, saved)
        return (carry, following), output

    starts = jnp.arange(0, rows, size, dtype=jnp.int32)
    (carry, _), outputs = jax.lax.scan(iterate, (carry, gather(0)), (starts, saved))
    return carry, outputs


def _shard_map(sharding: VocabSharding, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
    return jax.shard_map(local, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def sum_over_vocab(
    sharding: VocabSharding, term: Callable[[Inputs, Array], Array], terms: int, inputs: Inputs, per_token: Array
) -> Float[Array, "N terms"]:
    """Σ over the vocabulary of `term(inputs, per_token)`, each for the rows of W in its `inputs`, in float32."""
    sharding.check_shape(*inputs.unembedding.shape)
    sharding = sharding.without_trivial_axes()
    tokens = inputs.hidden.shape[0]
    length = round_up(tokens, sharding.count(sharding.tokens))
    inputs = inputs._replace(hidden=padded(inputs.hidden, length), scale=padded(inputs.scale, length))
    per_token = padded(per_token, length)
    main, tail = _split_rows(inputs, sharding.count(sharding.vocab))

    def local(inputs: Inputs, tail: _Tail | None, per_token: Array) -> Array:
        def step(total: Array, part: Inputs, *_: Any) -> tuple[Array, None]:
            return total + term(part, per_token), None

        zero = jnp.zeros((len(per_token), terms), jnp.float32)
        total, _ = _over_pieces(sharding, inputs, step, zero)
        total = jax.lax.psum(total, sharding.vocab)
        return total if tail is None else total + term(inputs._replace(**tail), per_token)

    tokens_spec = P(sharding.tokens)
    mapped = _shard_map(sharding, local, (_input_specs(sharding), P(), tokens_spec), tokens_spec)
    return mapped(main, tail, per_token)[:tokens]


def _no_moments(options: Options, needed: frozenset[str], tokens: int, width: int) -> Moments:
    """The moments of an empty vocabulary: merging with them changes nothing."""
    zeros = jnp.zeros((tokens,), jnp.float32)
    sums = zeros if options.scales is None else jnp.zeros((tokens, len(options.scales)), jnp.float32)
    return Moments(
        max_logit=jnp.full((tokens,), jnp.finfo(jnp.float32).min),
        argmax=jnp.full((tokens,), jnp.iinfo(jnp.int32).max) if "argmax" in needed else None,
        weight=sums,
        expected_row=jnp.zeros((tokens, width), jnp.float32) if "expected_row" in needed else None,
        **dict.fromkeys(needed & {"first", "second"}, sums),
        **dict.fromkeys(needed & {"total", "target"}, zeros),
    )


def _gather(axes: tuple[str, ...], mine: Moments) -> list[Moments]:
    """`mine` of every shard, all but `argmax` in one collective."""
    floats, structure = jax.tree.flatten(mine._replace(argmax=None))
    rows = [jnp.atleast_2d(x.T) for x in floats]  # [N] as [1, N], and [N, K] as [K, N]
    ends = np.cumsum([len(x) for x in rows])[:-1]
    gathered = jax.lax.all_gather(jnp.concatenate(rows), axes)
    argmax = None if mine.argmax is None else jax.lax.all_gather(mine.argmax, axes)
    shards = []
    for k in range(len(gathered)):
        rows_of_shard = jnp.split(gathered[k], ends)
        fields = [x.T.reshape(like.shape) for x, like in zip(rows_of_shard, floats, strict=True)]
        moments = structure.unflatten(fields)
        shards.append(moments._replace(argmax=None if argmax is None else argmax[k]))
    return shards


def _merge_shards(sharding: VocabSharding, mine: Moments, scale: Array) -> Moments:
    """The moments of the whole vocabulary, on every device, from the moments of its shards.

    `expected_row` stays this shard's term: the backward pass sums the terms, together with the rest of dh.
    """
    if not sharding.vocab:
        return mine
    shards = _gather(sharding.vocab, mine._replace(expected_row=None))
    total: Moments = functools.reduce(functools.partial(stats.merge, scale=scale), shards)
    if mine.expected_row is None:
        return total
    delta = jnp.maximum(mine.max_logit - total.max_logit, stats.FLOOR)
    fraction = mine.weight * jnp.exp(scale * delta) / total.weight
    return total._replace(expected_row=fraction[:, None] * mine.expected_row.astype(jnp.float32))


def _add(x: Array | None, y: Array | None) -> Array | None:
    """x + y, where None stands for zeros."""
    if x is None:
        return y
    return x if y is None else x + y


@dataclasses.dataclass(frozen=True)
class Sharded(Implementation):
    """`inner` on every device's part of the vocabulary; the number of tokens divides into their shards."""

    inner: Implementation
    sharding: VocabSharding

    def __post_init__(self) -> None:
        for name in ("gives_expected_row", "gradients_are_separate"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def check(self, options: Options, inputs: Inputs, platform: Platform) -> str:
        if self.inner.is_dense:
            raise NotImplementedError("it is dense and takes no sharding.")
        note, *_ = [self.inner.check(options, part, platform) for part in _parts(self.sharding, inputs)]
        return note

    def saved_bytes(self, itemsize: int) -> float:
        return self.inner.saved_bytes(itemsize)

    @jax.jit(static_argnums=range(4))
    def forward(self, options: Options, needed: frozenset[str], save: bool, inputs: Inputs) -> tuple[Moments, Any]:
        sharding = self.sharding
        main, tail = _split_rows(inputs, sharding.count(sharding.vocab))
        tail_start = main.unembedding.shape[0]

        def local(inputs: Inputs, tail: _Tail | None) -> tuple[Moments, Any]:
            def step(total: Moments | None, part: Inputs, start: Array | int, _: Any) -> tuple[Moments, Any]:
                targets = None if part.targets is None else part.targets - start
                moments, saved = self.inner.forward(options, needed, save, part._replace(targets=targets))
                moments = moments._replace(argmax=None if moments.argmax is None else moments.argmax + start)
                total = moments if total is None else stats.merge(total, moments, scale)
                return total, saved

            scale = options.scales_of_sums(inputs)
            nothing = _no_moments(options, needed, *inputs.hidden.shape) if sharding.width else None
            total, saved = _over_pieces(sharding, inputs, step, nothing)
            total = _merge_shards(sharding, total, scale)
            saved_tail = None
            if tail is not None:
                tail_moments, saved_tail = step(None, inputs._replace(**tail), tail_start, None)
                if tail_moments.expected_row is not None and sharding.vocab:
                    is_first_shard = jax.lax.axis_index(sharding.vocab) == 0
                    tail_row = jnp.where(is_first_shard, tail_moments.expected_row, 0)
                    tail_moments = tail_moments._replace(expected_row=tail_row)
                total = stats.merge(total, tail_moments, scale)
            per_device = (total.expected_row, (saved, saved_tail))
            return total._replace(expected_row=None), jax.tree.map(lambda x: x[None], per_device)

        one_per_device = P((*sharding.vocab, *sharding.tokens))
        out_specs = (P(sharding.tokens), one_per_device)
        mapped = _shard_map(sharding, local, (_input_specs(sharding), P()), out_specs)
        moments, (expected_row, saved) = mapped(main, tail)
        return moments._replace(expected_row=expected_row), saved

    @jax.jit(static_argnums=range(3))
    def backward(
        self, options: Options, wanted: frozenset[str], inputs: Inputs, cotangents: Cotangents, into: Gradients | None
    ) -> Gradients:
        sharding = self.sharding
        main, tail = _split_rows(inputs, sharding.count(sharding.vocab))
        tail_start = main.unembedding.shape[0]
        per_device = (cotangents.expected_row, cotangents.saved)
        cotangents = cotangents._replace(expected_row=None, saved=None)

        def over_tokens(x: Array | None) -> Array | None:
            return None if x is None else jax.lax.psum(x.astype(jnp.float32), sharding.tokens)

        def stored_columns(dw: Array | None) -> Array | None:
            """Sums dW of a piece, [rows, D], over the tokens, and returns the columns that this device stores."""
            if dw is None or not sharding.width:
                return over_tokens(dw)
            columns = jax.lax.psum_scatter(dw.astype(jnp.float32), sharding.width, scatter_dimension=1, tiled=True)
            return jax.lax.psum(columns, tuple(axis for axis in sharding.tokens if axis not in sharding.width))

        def local(inputs: Inputs, tail: _Tail | None, cotangents: Cotangents, per_device: Any) -> tuple[Any, Gradients]:
            """The gradients of this device's tokens and rows of W, dh summed over the vocabulary; those of the tail."""
            expected_row, (saved, saved_tail) = jax.tree.map(lambda x: x[0], per_device)
            softmax = cotangents.softmax
            if expected_row is not None:  # the softmax part of dh is softmax · expected_row, added below
                cotangents = cotangents._replace(softmax=None)

            def gradients(part: Inputs, start: Array | int, saved: Any) -> Gradients:
                one_hots = tuple((ids - start, g) for ids, g in cotangents.one_hots)
                part_cotangents = cotangents._replace(one_hots=one_hots, saved=saved)
                return self.inner.backward(options, wanted, part, part_cotangents, None)

            def step(d_hidden: Array | None, part: Inputs, start: Array | int, saved: Any) -> tuple[Any, Any]:
                new = gradients(part, start, saved)
                return _add(d_hidden, new.hidden), (stored_columns(new.unembedding), new.bias)

            needs_zeros = sharding.width and "hidden" in wanted  # as the carry of a scan
            zeros = jnp.zeros(inputs.hidden.shape, jnp.float32) if needs_zeros else None
            d_hidden, d_pieces = _over_pieces(sharding, inputs, step, zeros, saved)
            # [pieces, rows, ...] as [pieces · rows, ...]
            d_unembedding, d_bias = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), d_pieces)
            if expected_row is not None and softmax is not None:
                softmax_part = softmax[:, None] * expected_row.astype(jnp.float32)  # [N, D]
                if inputs.valid is not None:
                    softmax_part = jnp.where(inputs.valid[:, None], softmax_part, 0.0)
                d_hidden = _add(d_hidden, softmax_part)
            if d_hidden is not None:
                d_hidden = jax.lax.psum(d_hidden.astype(jnp.float32), sharding.vocab)
            tail_gradients = Gradients()
            if tail is not None:  # every device has the tail: its part of dh is added once, after the sum over shards
                tail_gradients = gradients(inputs._replace(**tail), tail_start, saved_tail)
                d_hidden = _add(d_hidden, tail_gradients.hidden)
                tail_gradients = Gradients(
                    None, over_tokens(tail_gradients.unembedding), over_tokens(tail_gradients.bias)
                )
            return Gradients(d_hidden, d_unembedding, over_tokens(d_bias)), tail_gradients

        specs = _input_specs(sharding)
        one_per_device = P((*sharding.vocab, *sharding.tokens))
        in_specs = (specs, P(), P(sharding.tokens), one_per_device)
        out_specs = (Gradients(*specs[:3]), P())
        mapped = _shard_map(sharding, local, in_specs, out_specs)
        main_gradients, tail_gradients = mapped(main, tail, cotangents, per_device)
        if tail is None:
            return main_gradients
        rows = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), main_gradients._replace(hidden=None), tail_gradients)
        return rows._replace(hidden=main_gradients.hidden)
