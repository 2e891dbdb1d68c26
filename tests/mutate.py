"""Small mutations of the library, and the tests that must kill each: `python tests/mutate.py [WORD...]`.

A mutation is one replacement in one file: a sign, a mask, an edge, a dtype, an index off by one, a missing step. It is
made in a copy of the repository, where the tests named beside it run until the first failure. They are of the default
suite, and few, so that the whole table takes minutes. WORD selects rows whose file or text contains it. Prints a row
for each mutation, then how many each test file killed; the exit code is 1 if any survived.
"""

import collections
import contextlib
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
from assets import ASSETS

ROOT = Path(__file__).parents[1]
SECONDS = 900  # a mutation may also make a loop endless
# Every mutation gets a process, in which all that it imports but the library is there already.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["conftest", "flax.linen", "optax", "orbax.checkpoint", "grain", "qwix", "transformers", "scipy.optimize"]
)


class Mutation(NamedTuple):
    """`old`, which stands once in calibjax/`file`, becomes `new`; `tests` are arguments of pytest below tests/."""

    file: str
    old: str
    new: str
    tests: str


OPERATOR, METHODS = "kernels/test_operator.py", "recalibrate/test_methods.py"
LAWS, CURVES = "metrics/test_laws.py -k formulas", "kernels/test_curves.py -k tpu_kernel_matches"
DECISIONS = "eval/test_decisions.py commands/test_decide.py"
SOLVERS, SCIKIT = "recalibrate/test_solvers.py", f"{METHODS} -k scikit_learn"
TABLE = {
    "kernels/stats.py": [
        ("total / jnp.maximum(jnp.sum(self.valid), 1)", "total / self.valid.size", "test_front_door.py -k packed"),
        ("(b.argmax < a.argmax)", "(b.argmax > a.argmax)", f"{OPERATOR} -k merge"),
        ("growth = 2.0 *", "growth = 1.0 *", f"{OPERATOR} -k merge"),
        ("jnp.where(target_logit < self.max_logit, -jnp.inf, 0.0)", "0.0", f"{OPERATOR} -k any_size"),
    ],
    "kernels/operator.py": [
        ("(ids, times_slope(d_logit, z, call.options.softcap))", "(ids, d_logit)", f"{OPERATOR} -k each_cotangent"),
        ("jnp.where(jnp.isinf(centred), 0.0, centred)", "centred", f"{OPERATOR} -k 1e30"),
        ("inside = (ids >= 0) &", "inside = (ids >= -1) &", "kernels/test_sharded.py -k a_target_before"),
    ],
    "kernels/chunked.py": [("jnp.minimum(log_p, 0.0)", "jnp.minimum(log_p, jnp.inf)", f"{OPERATOR} -k 1e30")],
    "kernels/api.py": [
        ("bad_target = valid & ~in_range", "bad_target = ~in_range", "kernels/test_cross_entropy.py -k settings_of_jax")
    ],
    "kernels/cross_entropy.py": [
        ("jnp.maximum(jnp.sum(valid), 1)", "jnp.sum(valid)", "kernels/test_cross_entropy.py -k all_masked")
    ],
    "kernels/sharded.py": [
        (
            "gathered = jax.lax.all_gather(jnp.concatenate(rows), axes)",
            "gathered = jax.lax.all_gather(jax.lax.stop_gradient(jnp.concatenate(rows)), axes)",
            "kernels/test_sharded.py -k second_derivatives",
        ),
        ("else moments.argmax + start", "else moments.argmax", "kernels/test_sharded.py -k one_device and 2x2x2"),
    ],
    "data/sequences.py": [
        ("(ids < 0) | (ids >= size)", "ids >= size", "test_front_door.py -k another_vocabulary"),
        ("example.loss_mask[start + 1 : end + 1]", "example.loss_mask[start:end]", "data/test_sequences.py"),
        ('size, side="right"', 'size, side="left"', "data/test_splits.py"),
    ],
    "kernels/top_k.py": [("column + start]", "column]", "kernels/test_top_k.py")],
    "kernels/pallas_tpu/statistics.py": [
        ("larger = z > best", "larger = z >= best", f"{OPERATOR} -k ties and tpu"),
        ("vocab_size - start) - sublane", "vocab_size - start + 1) - sublane", CURVES),
        ("e = e * e", "e = e * e * e", CURVES),
    ],
    "kernels/pallas_tpu/expected_row.py": [
        ("jnp.where(near, 0.0, 1.0)", "jnp.where(near, 0.0, 0.0)", f"{OPERATOR} -k float64 and 1100-9-8"),
        ("z.shape, 1) < count - k", "z.shape, 1) <= count - k", f"{OPERATOR} -k float64 and 1100-9-8"),
    ],
    "kernels/pallas_tpu/backward.py": [
        ("refs.clears[step] > 0", "refs.clears[step] > 1", f"{OPERATOR} -k masked_ones"),
        ("lane < tokens - group", "lane <= tokens - group", f"{OPERATOR} -k float64 and 300-130"),
    ],
    "kernels/pallas_tpu/common.py": [
        ("x.shape, axis) < count", "x.shape, axis) <= count", f"{OPERATOR} -k wide_hidden and 2312")
    ],
    "kernels/contract.py": [
        ("if dz is None else dz * slope", "if dz is None else dz", f"{OPERATOR} -k float64 and 2-7-100")
    ],
    "kernels/pallas_gpu/forward.py": [
        ("column < vocab_size -", "column <= vocab_size -", f"{OPERATOR} -k float64 and 150-7-64")
    ],
    "kernels/pallas_gpu/backward.py": [
        ("+ jnp.clip(ratio", "- jnp.clip(ratio", "kernels/test_gpu.py -k relative_to"),
        (".at[0].set(1.0)", "", "kernels/test_gpu.py -k relative_to"),
    ],
    "losses/per_token.py": [
        ("jnp.maximum(-jnp.expm1(log_prob), 1e-12)", "-jnp.expm1(log_prob)", "losses/test_per_token.py -k certainty"),
        ("jnp.where(right, 0.0, stats", "(stats", "losses/test_per_token.py -k removed_entries"),
        (".astype(jnp.float32) - n_right", ".astype(jnp.float32)", "losses/test_per_token.py -k selective"),
    ],
    "losses/bounds.py": [("math.log(gap) + log_one", "math.log(gap) - log_one", "losses/test_bounds.py")],
    "losses/long_horizon.py": [
        (
            "None if segment_ids is None else segment_ids[:, ::-1]",
            "segment_ids",
            "losses/test_long_horizon.py -k definition",
        ),
        ("jax.lax.stop_gradient(weights)", "weights", "losses/test_long_horizon.py -k no_gradient"),
    ],
    "metrics/sums.py": [
        ('_search(edges, confidence, "left")', '_search(edges, confidence, "right")', LAWS),
        ("(high - (total - added)) + (x - added)", "0.0 * low", "metrics/test_bootstrap.py -k digits"),
    ],
    "metrics/errors.py": [("/ (several - 1)", "/ several", "metrics/test_laws.py -k formulas")],
    "metrics/ranking.py": [("blocks.value_before + blocks.value / 2", "blocks.value_before + blocks.value", LAWS)],
    "metrics/local.py": [("/ jnp.maximum(n_b - 2, 1.0)", "/ jnp.maximum(n_b - 1, 1.0)", f"{LAWS} or grouping")],
    "metrics/_points.py": [("~some_invalid", "~jnp.any(~is_valid)", LAWS)],
    "metrics/intervals.py": [
        ("(groups / max(groups - 1, 1))", "1.0", "metrics/test_intervals.py -k folded_normal"),
        ("(below + ties / 2) /", "(below + ties) /", "metrics/test_bootstrap.py -k comparison"),
    ],
    "recalibrate/temperature.py": [
        ("jnp.square(stats.scale) *", "stats.scale *", "recalibrate/test_temperature.py -k derivatives"),
        ("square - jnp.square(expected)", "square + jnp.square(expected)", "recalibrate/test_temperature.py -k daca"),
        ("possible = logits >", "possible = logits <", "recalibrate -k impossible"),
    ],
    "recalibrate/contract.py": [("(classes or 0) - 1", "(classes or 0)", f"{METHODS} -k mistakes")],
    "recalibrate/nonparametric.py": [
        ("(x[ends - 1].astype(np.float64) + x[ends]) / 2", "x[ends - 1]", f"{METHODS} -k no_bin")
    ],
    "recalibrate/logistic.py": [
        ("1 / (1 + e) - y", "1 / (1 + e) + y", f"{SOLVERS} -k logistic"),
        ("((confidence == 0) | (confidence == 1))", "(confidence == 1)", f"{METHODS} -k exact_ones"),
        ("x, z), -700.0)", "x, z), -900.0)", f"{SOLVERS} -k logistic"),
    ],
    "recalibrate/affine.py": [
        ("jnp.where(jnp.eye(classes, dtype=bool), 0.0, matrix)", "matrix", f"{METHODS} -k optimum"),
        ("- jnp.sum(jnp.where(is_label, scores, 0.0), axis=1)", "- jnp.max(scores, axis=1)", SCIKIT),
    ],
    "recalibrate/optimize.py": [
        ("self.converged and self.value > _SEPARATED", "self.converged", f"{METHODS} -k platt-all"),
        ("or x.size > _MAX_PRECONDITIONED", "or True", f"{METHODS} -k optimum"),
    ],
    "recalibrate/features.py": [("accuracy[0] - accuracy_loss", "accuracy[0] - 1.0", f"{METHODS} -k feature_clipping")],
    "recalibrate/agreement.py": [
        ("z.argmax(axis=1) == b.argmax(axis=1)", "z.argmax(axis=1) >= 0", "recalibrate/test_temperature.py -k daca")
    ],
    "data/pipeline.py": [("places >= len(rows)", "places > len(rows)", "data/test_pipeline.py")],
    "data/examples.py": [
        ("np.maximum(end, begin + 1) > first", "end > first", "data/test_examples.py -k width"),
        ("is_warned and tokens[:2]", "is_warned and tokens[1:3]", "data/test_examples.py -k named"),
    ],
    "data/choices.py": [("len(tokens) - 1 <= max_tokens", "len(tokens) <= max_tokens", "data/test_choices.py")],
    "nn/experts.py": [
        ("base = top if mixture.normalized else logits", "base = top", "nn/test_experts.py -k routing"),
        ("ranks - starts[expert_of]", "ranks", "nn/test_experts.py -k products"),
    ],
    "nn/attention.py": [
        ("allowed &= distance < (", "allowed &= distance <= (", "models/test_decoder.py -k window"),
        ("None] < self.until", "None] <= self.until", "eval/test_scoring.py -k dense_formula"),
    ],
    "nn/blocks.py": [
        ("self.offset + _last_axis(scale, x)", "_last_axis(scale, x)", "nn/test_blocks.py -k float64"),
        (
            "(update.astype(jnp.float32) * cfg.residual_scale).astype(update.dtype)",
            "update * jnp.asarray(cfg.residual_scale, update.dtype)",
            "nn/test_blocks.py -k rounded",
        ),
    ],
    "heads.py": [
        ("segment_ids[:, None, :]) & counts[:, None, :]", "segment_ids[:, None, :])", "test_heads.py -k sequence"),
        ("dtype=jnp.float32) - 1.0, 1.0)", "dtype=jnp.float32), 1.0)", "test_heads.py -k features"),
    ],
    "models/generate.py": [
        (", axis=-1) - probabilities", ", axis=-1)", "models/test_generate.py -k cuts"),
        ("max_new_tokens - 1, 1)  #", "max_new_tokens - 2, 1)  #", "models/test_generate.py -k without_cache"),
        ("inputs & (np.arange(length) >= prompt_tokens - 1)", "inputs", "train/test_lhts.py -k samples"),
    ],
    "models/decoder.py": [
        ("not any(config.local_layers)", "not all(config.local_layers)", "models/test_families.py -k golden and gemma")
    ],
    "models/calibrated.py": [
        ("others & (log_probs >= top)", "others & (log_probs > top)", "models/test_calibrated.py -k ties")
    ],
    "train/step.py": [
        ("count = jnp.maximum(sums.divisor, 1.0)", "count = sums.divisor", "train/test_step.py -k one_program"),
        ("decay_steps = max(steps - warmup, 1)", "decay_steps = max(steps, 1)", "train/test_sft.py -k optimisers"),
    ],
    "train/loop.py": [('["step"] <= first_step', '["step"] < first_step', "train/test_loop.py -k bit or between")],
    "train/checkpoint.py": [
        ("all_steps(), reverse=True", "all_steps(), reverse=False", "train/test_loop.py -k bit or damaged")
    ],
    "train/cross_fit.py": [
        ("_NOISE * refit.standard_error", "0.0", "train/test_ats.py -k two_standard_errors"),
        ("difference < -_NOISE * error", "difference < 0.0", "train/test_ats.py -k beats_beyond_noise"),
    ],
    "train/sft.py": [
        ("z_loss=0.0, temperature=1.0, remat", "z_loss=0.0, remat", "train/test_sft.py -k likelihood_alone")
    ],
    "train/lhts.py": [
        ("count // len(mean_log_p)", "count // (len(mean_log_p) + 1)", "train/test_lhts.py -k quantiles"),
        ("jax.lax.stop_gradient(decoder.unembed(self", "(decoder.unembed(self", "train/test_lhts.py -k reaches"),
    ],
    "train/tuning.py": [
        ("jax.tree.map(lambda x: x.astype(jnp.float32), params)", "params", "train/test_sft.py -k likelihood_alone")
    ],
    "train/probes.py": [
        ("width / (2 * count)", "width / count", "train/test_probes.py -k penalised"),
        ("- weights.astype(np.float64) @ mean", "", "train/test_probes.py -k penalised"),
    ],
    "eval/tokens.py": [
        ("TEMPERATURE_EDGES[0], TEMPERATURE_EDGES[-1]", "-np.inf, np.inf", "eval/test_tokens.py -k batch_size"),
        ("np.asarray(x[:real], np.float64)", "np.asarray(x[:real])", "eval/test_tokens.py -k batch_size"),
        ("ceil_div(jnp.sum(where), width)", "jnp.sum(where) // width", "eval/test_tokens.py -k batch_size"),
    ],
    "eval/tasks/scoring.py": [
        ("scored = 0 if self._shares else len(tokens)", "scored = 0", "eval/test_scoring.py -k dense_formula"),
        ("for column in path[common:]:", "for column in path[common + 1 :]:", "eval/test_scoring.py -k trees"),
    ],
    "eval/answers/decide.py": [
        ("if low < number(decimal) < high", "if low <= number(decimal) < high", DECISIONS),
        ("scores[scores > value]", "scores[scores >= value]", DECISIONS),
        ("probabilities[probabilities < value]", "probabilities[probabilities > value]", DECISIONS),
        ("allowed = sums + 1 <=", "allowed = sums <=", "eval/test_decisions.py -k claims_by"),
        ("np.maximum.accumulate(fraction[begin:end])", "fraction[begin:end]", "eval/test_decisions.py -k claims_by"),
    ],
    "data/records.py": [
        ("others = 1.0 -", "others = 0.5 -", "data/test_table.py -k echo"),
        (
            '"confidence": length_normalised,',
            '"confidence": length_normalised**0.7,',
            "data/test_table.py -k server-chat",
        ),
        ('if item["rank"] <= len(listed)', 'if item["rank"]', "data/test_table.py -k unlikely"),
        ("readable.lstrip().startswith(answer)", "place == 0", "data/test_table.py -k reasoning"),
        ("not _UNKNOWN_LOG_PROB < value", "not _UNKNOWN_LOG_PROB <= value", "data/test_table.py -k sentinel"),
    ],
    "data/formats.py": [
        ("weight != 0 and number", "number", "data/test_templates.py -k case"),
        ("number == len(parts) - 1", "number >= 0", "data/test_templates.py -k prompt"),
    ],
    "data/table.py": [
        ("words else None).astype(np.float64)", "words else None).astype(np.float32)", "data/test_table.py -k float64"),
        ("_LEAST_PERCENT < known.max()", "1 < known.max()", "data/test_table.py -k ratings"),
        ("return not all(", "return True or all(", "data/test_table.py -k thousands"),
        ("cells.astype(str).astype(np.float64)", "cells", "data/test_table.py -k float32"),
        ("columns[name] = [None] * count", "columns[name] = []", "data/test_table.py -k late"),
    ],
    "eval/answers/probe_features.py": [("spans.start - 1)", "spans.start)", "train/test_probes.py -k features")],
    "runtime/files.py": [
        ("- {entry.name for entry in fresh.iterdir()}", "- _entries(path, replace)", "runtime/test_files.py")
    ],
    "runtime/checksums.py": [
        ("json.dumps([str(leaf.dtype), leaf.shape])", "json.dumps([leaf.shape])", "runtime/test_checksums.py -k counts")
    ],
    "runtime/sharding.py": [("(index < 0) | (index >=", "(index >=", "runtime/test_sharding.py -k lookup")],
    "runtime/arrays.py": [
        (
            "np.clip(values, max(limits.min, np.iinfo(values.dtype).min), limits.max)",
            "values",
            f"{OPERATOR} -k outside_the_vocabulary",
        )
    ],
}
"""File -> rows of what is replaced, by what, and the tests that must kill it."""
MUTATIONS = [Mutation(file, *row) for file, rows in TABLE.items() for row in rows]


def check() -> None:
    """Exits where a row does not fit the sources: its old text does not stand there exactly once."""
    wrong = [m for m in MUTATIONS if (ROOT / "calibjax" / m.file).read_text().count(m.old) != 1]
    if wrong:
        sys.exit("\n".join(f"{m.file}: expected exactly once: {m.old}" for m in wrong))


class _FirstFailure:
    """Plugin that keeps the name of the first test that fails."""

    test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.test = self.test or (report.nodeid if report.failed else "")


def run_tests(copy: Path, tests: str, result: Connection) -> None:
    """Sends pytest's exit code and the first test that fails; in a process of its own."""
    del sys.modules["conftest"]  # the copy has its own
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ |= {"PYTHONPATH": str(copy), "CALIBJAX_ASSETS": str(ASSETS)}
    names, *chosen = tests.split(" -k ")
    first, output = _FirstFailure(), io.StringIO()
    command = ["-x", "-q", "-n0", "--tb=short", "-pno:cacheprovider", *(f"tests/{name}" for name in names.split())]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main([*command, *(("-k", chosen[0]) if chosen else ())], plugins=[first])
    result.send((int(code), first.test.removeprefix("tests/"), output.getvalue()))


def run(mutation: Mutation, copy: Path) -> str:
    """The first test that fails; "" where none does."""
    file = copy / "calibjax" / mutation.file
    sound = file.read_text()
    file.write_text(sound.replace(mutation.old, mutation.new))
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=run_tests, args=(copy, mutation.tests, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            return f"{mutation.tests.split()[0]} (more than {SECONDS} s)"
        code, test, output = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode is None or process.exitcode >= 0:  # not by a signal: an error of this script
            sys.exit(f"{mutation}: the tests did not run")
        return f"{mutation.tests.split()[0]} (signal {-process.exitcode})"
    finally:
        process.kill()
        process.join()
        file.write_text(sound)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"{mutation}: the tests cannot be run.\n{output}")
    return test


def main(words: list[str]) -> int:
    check()
    os.environ["PYTHONPATH"] = str(ROOT / "tests")  # of the server of forks, which imports the test settings
    chosen = [m for m in MUTATIONS if not words or any(word in f"{m.file} {m.old} {m.new}" for word in words)]
    killed, survivors = collections.Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for mutation in chosen:
            test = run(mutation, copy)
            killed[test.split("::")[0]] += bool(test)
            survivors += [] if test else [mutation]
            print(f"{'killed' if test else 'SURVIVED':8} {mutation.file}: {mutation.new!r}   {test}", flush=True)
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} killed")
    for test, count in sorted((+killed).items()):
        print(f"{count:3} {test}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
