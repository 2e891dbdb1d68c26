"""Cost of `calibjax train ats`, divided by one pass of the frozen model over the same tokens, in one process.

    python train/bench_ats.py path/to/SmolLM2-135M-Instruct path/to/alpaca.jsonl

The frozen pass computes the hidden states of all sequences, those to fit on and those held out. Divided by it are the
fit (`calibjax.fit_ats`) and the exact evaluation of the base model, temperature scaling and the head on the held-out
sequences (`calibjax.evaluate`). Most programs are compiled before, on a few sequences. Those of the heads that are
chosen are compiled in the time that is measured; a further ratio leaves this out. The pass is timed before and after
the rest, because the speed of a machine drifts.
"""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Annotated

import jax

import calibjax
from calibjax.data import eval_batches
from calibjax.data.pipeline import even_batch_size
from calibjax.runtime.options import Positional

COMPILATION = "/jax/core/compile/backend_compile_duration"
BATCH_SIZE = 16  # most sequences per forward pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Times the parts of `train ats`.

    Attributes:
        model: directory or GGUF file of the frozen model.
        data: as `calibjax train ats --data`.
        sequences: to read, of `seq_len` tokens.
        seq_len: tokens of a sequence.
    """

    model: Annotated[str, Positional()]
    data: Annotated[str, Positional()]
    sequences: int = 560
    seq_len: int = 257


def frozen_pass(lm: calibjax.LanguageModel, sequences: calibjax.Sequences) -> float:
    """Seconds to compute the hidden states of all sequences."""
    begin = time.perf_counter()
    for batch, _ in eval_batches(sequences.arrays(), BATCH_SIZE):
        where = {name: batch[name] for name in ("segment_ids", "positions")}
        jax.block_until_ready(lm.hidden_states(batch["tokens"], **where))
    return time.perf_counter() - begin


def one_batch(sequences: calibjax.Sequences) -> calibjax.Sequences:
    """As many sequences as one batch of theirs has."""
    return sequences.take(slice(even_batch_size(len(sequences.tokens), BATCH_SIZE)))


def fit_and_evaluate(
    lm: calibjax.LanguageModel, fit: calibjax.Sequences, held_out: calibjax.Sequences
) -> tuple[float, float, calibjax.Evaluation]:
    """Seconds of the fit and of the evaluation, and its figures."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        context = calibjax.RunContext(directory=Path(directory), progress=False)
        fitted = calibjax.fit_ats(lm, fit, calibjax.AtsOptions(batch_size=BATCH_SIZE), context)
    middle = time.perf_counter()
    figures = calibjax.evaluate(lm, held_out, fitted.heads, batch_size=BATCH_SIZE, context=context.silent())
    return middle - begin, time.perf_counter() - middle, figures


def main(bench: Bench) -> None:
    lm = calibjax.load_model(bench.model)
    data = calibjax.load_text(bench.data, lm, seq_len=bench.seq_len, max_sequences=bench.sequences)
    fit, held_out = calibjax.split_sequences(data, 0.7)
    frozen_pass(lm, data.take(slice(BATCH_SIZE)))
    fit_and_evaluate(lm, one_batch(fit), one_batch(held_out))
    before = frozen_pass(lm, data)
    compilations: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **kwargs: compilations.append(duration_secs) if event == COMPILATION else None
    )
    fitting, evaluation, figures = fit_and_evaluate(lm, fit, held_out)
    after = frozen_pass(lm, data)
    forward = (before + after) / 2
    tokens = data.tokens.size
    print(f"frozen pass over {tokens:,} positions: {before:.1f} s, after the rest {after:.1f} s")
    print(f"fit, its own frozen pass included:      {fitting:.1f} s")
    print(f"evaluation, its own pass included:      {evaluation:.1f} s")
    print(f"train ats / frozen pass:                {(fitting + evaluation) / forward:.2f}")
    compilation = sum(compilations)
    print(f"without {compilation:.1f} s of compilation:         {(fitting + evaluation - compilation) / forward:.2f}")
    print(figures)


if __name__ == "__main__":
    main(calibjax.parse_script(Bench))
