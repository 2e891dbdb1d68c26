"""Large and degenerate data: memory follows what is kept, not the size of the source."""

import gzip
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny import write_model

from calibjax.data import Rows, count_repeats, load_sequences, read_source, split_sequences
from calibjax.runtime.errors import UserError

GB = float(os.environ.get("CALIBJAX_LARGE_GB", "0.5"))
"""Size of the file of `test_memory_does_not_follow_the_file`; docs/reliability.md gives the figures of 10."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("large") / "model")


@pytest.fixture(scope="module")
def tokenizer(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def measured(model, source, **options):
    """Sequences of a source, read in a process of its own: (shape, description, MB of memory at the most)."""
    # getrusage would give the larger one of this process and of the one that started it.
    code = f"""
        import json, re
        from pathlib import Path
        from transformers import AutoTokenizer
        from calibjax.data import load_sequences, read_source
        tokenizer = AutoTokenizer.from_pretrained({str(model)!r})
        sequences, text = load_sequences(read_source({str(source)!r}), tokenizer, seq_len=64, **{options!r})
        peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
        print(json.dumps([sequences.tokens.shape, text, peak]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_line_of_200_mb(model, tmp_path):
    """Of which 50 sequences are needed: the rest of it is not tokenised."""
    words = " ".join(f"w{i % 40}" for i in range(1000)) + " "
    file = tmp_path / "line.jsonl"
    file.write_text(json.dumps({"text": words * (209_000_000 // len(words))}) + "\n")
    shape, _, peak = measured(model, file, layout="pack", max_sequences=50)
    assert shape == [50, 63]
    assert peak < 1800


@pytest.mark.slow
def test_memory_does_not_follow_the_file(model, tmp_path):
    """Rows are dropped as they are read: a file of 100 MB takes as much memory as a larger one."""
    row = {"text": "w1 w2 w3", "other": "x" * 10_000}
    last = {"text": " ".join(["w1"] * 64), "other": ""}
    member = gzip.compress("".join(json.dumps(r) + "\n" for r in (*[row] * 5_000, last)).encode(), 1)
    peaks = []
    for number in (2, max(4, round(GB * 20))):  # members of 50 MB
        file = tmp_path / f"{number}.jsonl.gz"
        with file.open("wb") as out:
            for _ in range(number):
                out.write(member)
        shape, description, peak = measured(model, file, layout="full")
        assert shape == [number, 63]
        assert f"{number * 5_001:,} rows read, {number * 5_000:,} of them dropped" in description
        peaks.append(peak)
    print(f"{GB} GB: {peaks} MB")
    assert peaks[1] - peaks[0] < 50


@pytest.mark.parametrize("layout", ["pack", "pad"])
def test_broken_rows(layout, tokenizer, tmp_path):
    """Mixed types and rows that are no rows: named by file and line; left out and counted only if asked."""
    lines = ['{"text": "w1 w2"}', '{"text": 3}', '{"txt": "w1"}', '{"text": "w3 w4"}', "null", '{"text": "\\ud800"}']
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n\n".join(lines))
    with pytest.raises(UserError, match=rf"^{file}, line 3, column 'text': expected a string, got int '3'"):
        load_sequences(read_source(file), tokenizer, seq_len=4, layout=layout)
    sequences, text = load_sequences(read_source(file, skip_broken=True), tokenizer, seq_len=4, layout=layout)
    assert sequences.where.sum() == 2
    assert f"; 4 broken rows skipped, the first: {file}, line 3, column 'text'" in text


@pytest.mark.parametrize("layout", ["pack", "pad", "full"])
def test_repeats_between_parts_are_counted(layout, tokenizer):
    """And where there is nothing to predict, one token or an empty text, no batch is empty."""

    def load(texts):
        rows = Rows([{"text": text} for text in texts], "made")
        return load_sequences(rows, tokenizer, seq_len=12, layout=layout)[0]

    texts = [" ".join(f"w{(7 * i + j) % 40}" for j in range(12)) for i in range(40)]
    assert count_repeats(*split_sequences(load(texts[:20]), 0.5))[0] == 0
    doubled = load([*texts[:10], *texts[:3], *texts[20:27]])
    assert count_repeats(*split_sequences(doubled, 0.5)) == (3, 10)
    for text in ("w1", "", " "):
        with pytest.raises(UserError, match="has anything to predict"):
            load([text])
