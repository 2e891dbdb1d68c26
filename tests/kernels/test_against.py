"""Our static estimates beside measured times: the factor of a chip, the range it gives, and what cannot be compared."""

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "kernels"
BLOCKS = '{"b_block_size":1024,"h_block_size":256,"v_block_size":2048}'
MS = {("xla", "forward"): 4.0, ("xla", "backward"): 7.0}
MS |= {("pallas_mosaic_tpu", "forward"): 3.0, ("pallas_mosaic_tpu", "backward"): 9.0}
OURS = {"forward": 2.0, "both": 6.0, "saved": 5.0}


def measurement(program, passes, tokens):
    ours = program == "pallas_mosaic_tpu"
    given = {"chip": "tpu7x", "implementation": program, "passes": passes, "x_dtype": "f32" if ours else "bf16"}
    sizes = {"N": tokens, "D": 256, "V": 10_000}
    milliseconds = MS[program, passes] * tokens / 4096
    return given | sizes | {"ms": milliseconds, "peak_memory_mb": 100.0, "blocks": BLOCKS if ours else "{}"}


@pytest.fixture
def against(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    rows = [measurement(*key, tokens) for key in MS for tokens in (4096, 16_384)]
    (tmp_path / "measured.json").write_text(json.dumps({"source": "a test", "rows": rows}))
    return importlib.import_module("against")


def run(tmp_path, chip="v7x", minutes=1):
    bench = importlib.import_module("bench")
    files = {name: str(tmp_path / f"{name}.json") for name in ("measured", "profiles", "found")}
    options = ["--static", chip, "--against", files["measured"], "--profiles", files["profiles"]]
    bench.main(bench.arguments().parse_args([*options, "--minutes", str(minutes), "--json", files["found"]]))
    return json.loads(Path(files["found"]).read_text())


def test_our_time_is_predicted_by_the_factor_of_their_kernel(against, tmp_path, monkeypatch):
    def compile_for(chip, build, what, tokens, width, vocab, *, profile):
        """Affine in N and V: ours the milliseconds of `OURS` at 4,096 tokens, theirs 0.9 and 0.6 of their time."""
        if isinstance(what, str):
            whole = OURS[what]
        else:
            whole = {"forward": 0.9, "backward": 0.6}[what.passes] * MS[what.program, what.passes]
        cycles = whole * 1e-3 * 2.2e9 * (0.25 + 0.75 * vocab / 10_000) * tokens / 4096
        return against.static_profile.Compiled({"all": cycles}, 2**20, 0.0)

    monkeypatch.setattr(against.static_profile, "compile_for", compile_for)
    record = run(tmp_path)
    stored = json.loads((tmp_path / "profiles.json").read_text())
    assert len(stored) == 2 * 3 + (4 + 4 + 2) + 4, "whole programs; of the profiles two N by two V, or two V"
    assert record["against"]["calibrated by"] == "pallas_mosaic_tpu"
    found = {(row["task"], row["shape"]["tokens"]): row for row in record["results"]}
    assert set(found) == {(task, tokens) for task in OURS for tokens in (4096, 16_384)}
    for (task, tokens), row in found.items():
        times, static = tokens / 4096, OURS[task]
        factors = (0.9, 0.9, 0.9) if task == "forward" else (0.6, 0.75, 0.9)
        assert row["static"] == pytest.approx(static * times)
        predicted = [row["predicted"][name] for name in ("to", "ms", "from")]
        assert predicted == pytest.approx([static * times / factor for factor in factors])
        both = (4.0, 3.0) if task == "forward" else (11.0, 12.0)
        assert list(row["times"].values()) == pytest.approx([both[1] * times, both[0] * times])
        assert row["temporaries"] == 2**20
    hidden, unembedding = 4096 * 256, 256 * 10_000
    assert found["forward", 4096]["extra_bytes"]["xla"] == 100 * 2**20 - 2 * (hidden + unembedding)
    theirs = max(100 * 2**20 - 8 * hidden - 6 * unembedding, 100 * 2**20 - 4 * hidden - 2 * unembedding)
    assert found["both", 4096]["extra_bytes"]["pallas_mosaic_tpu"] == theirs


def test_nothing_is_predicted_where_nothing_was_profiled(against, tmp_path, capsys):
    assert run(tmp_path, minutes=0)["results"] == []
    assert "no profile" in capsys.readouterr().out


def test_a_chip_without_measurements(against, tmp_path):
    with pytest.raises(against.UserError, match="no times measured on v5e; expected one of v6e, v7x"):
        run(tmp_path, "v5e")
