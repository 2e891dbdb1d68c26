"""Tables as people have them: each file in cases/ gives the values beside it, or is refused by name."""

import datetime
import decimal
import json
import re
from pathlib import Path

import numpy as np
import pytest

from calibjax.data.table import read_table, table_rows
from calibjax.data.write import write_rows
from calibjax.runtime.errors import UserError

CASES = Path(__file__).parent / "cases"
NAMES = sorted(file.name.removesuffix(".expected.json") for file in CASES.glob("*.expected.json"))


@pytest.mark.parametrize("name", NAMES)
def test_case(name):
    expected = json.loads((CASES / f"{name}.expected.json").read_text())
    expected.pop("source", None)  # where the situation was found
    options = {"outcomes": False, "columns": expected.pop("columns", None)}
    options |= {"skip_broken": expected.pop("skip_broken", False), "per_token": expected.pop("per_token", False)}
    if truth := expected.pop("truth", None):
        options["truth"] = CASES / "truth" / truth
    if "error" in expected:
        with pytest.raises(UserError, match=re.escape(expected["error"])) as caught:
            read_table(CASES / name, **options)
        assert str(CASES / name) in str(caught.value)
        return
    table = read_table(CASES / name, **options)
    for note in expected.pop("notes", []):
        assert any(note in line for line in table.notes), table.notes
    assert expected
    for key, wanted in expected.items():
        got = getattr(table, key, None) if hasattr(table, key) else getattr(table.predictions, key)
        if key == "categories":
            assert got.tolist() == wanted
        elif name.startswith("server"):  # computed in another order
            np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=1e-12, atol=1e-15, err_msg=key)
        else:  # the float64 that the text stands for, to its last bit
            np.testing.assert_array_equal(got, np.array(wanted, np.float64), err_msg=key)
    del options["outcomes"], options["columns"]
    assert len(list(table_rows(CASES / name, **options))) >= len(table)


def test_every_file_has_its_values():
    files = {file.name for file in CASES.glob("*.*") if not file.name.endswith(".expected.json")}
    assert files == set(NAMES)
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    named = re.findall(r"`([\w-]+\.(?:csv|tsv|jsonl|json|parquet|npz))`", text)
    assert len(named) > 30
    assert set(named) <= set(NAMES)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet", ".npz"])
def test_the_checksum_of_a_category_is_that_of_every_format(suffix):
    """A method that was fitted on one format meets the same categories in another."""
    expected = read_table(CASES / "labels.csv", outcomes=False).predictions.categories
    got = read_table(CASES / f"labels{suffix}", outcomes=False).predictions.categories
    np.testing.assert_array_equal(got, expected)


def test_aggregations_are_those_of_the_evaluation():
    from calibjax.data.records import aggregated
    from calibjax.eval.answers.confidence import answer_confidence

    log_probs = -np.random.default_rng(0).exponential(size=7)
    for name, value in aggregated(log_probs.tolist()).items():
        wanted = answer_confidence("length_normalised" if name == "confidence" else name, log_probs[None])
        np.testing.assert_allclose(value, wanted[0], rtol=1e-5)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_times_and_decimals_of_parquet_are_written_as_text(tmp_path, suffix):
    row = {"day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"), "number": 7}
    write_rows(tmp_path / f"x{suffix}", lambda: iter([row]))
    assert {name: str(cell) for name, cell in table_rows(tmp_path / f"x{suffix}").first.items()} == {
        name: str(cell) for name, cell in row.items()
    }


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".npz"])
def test_tokens_are_of_responses(suffix):
    with pytest.raises(UserError, match=rf"per_token: .*labels{suffix}.* server"):
        read_table(CASES / f"labels{suffix}", outcomes=False, per_token=True)


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_text_beside_numbers_is_refused_where_a_column_has_one_type(tmp_path, suffix):
    with pytest.raises(UserError, match="column x holds values of several types"):
        write_rows(tmp_path / f"t{suffix}", lambda: iter([{"x": 1}, {"x": "a"}]))


def test_scores_without_a_label_are_columns_like_others(tmp_path):
    (tmp_path / "t.csv").write_text("confidence,correct,p,p_1\n0.7,1,0.3,0.1\n0.6,0,0.2,0.2\n")
    assert read_table(tmp_path / "t.csv").predictions.confidence.tolist() == [0.7, 0.6]
