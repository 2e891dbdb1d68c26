"""What a run of a benchmark keeps: it is read as it was written, and anything else is one error with its remedy."""

import json
import zipfile

import numpy as np
import pytest
from tiny import make_lm

from calibjax import plot
from calibjax.eval.tasks import answer_files
from calibjax.eval.tasks.benchmark import answers_json, subjects_json
from calibjax.heads import FittedHead
from calibjax.runtime.checksums import seal
from calibjax.runtime.errors import UserError


def test_confidences_on_an_edge_are_counted():
    """Agreement of samples takes the values of edges, which open bins leave out: of further confidences they count."""
    agreement = np.float32([0, 0, 0.2, 0.4])
    confidence = np.stack([agreement, agreement])
    correct, texts = np.broadcast_to(np.float32([0, 1, 0, 1]), (2, 4)), np.array(["a", "a", "b", "b"])
    choice, log_prob = np.full((2, 4), -1, np.int32), np.full((2, 4), np.nan, np.float32)
    answers = answer_files.Answers(
        confidence, correct, choice, log_prob, texts, {}, np.zeros(4), 0, texts, texts, texts
    )
    names, binning = ["temperature", "consistency"], {"bins": 5, "closed": "none"}
    rows = answers_json(answers, names, **binning)["methods"]
    counts = {name: sum(row["reliability"]["count"]) for name, row in rows.items()}
    assert counts == {"temperature": 0, "consistency": 4}
    assert rows["consistency"]["ece"]["value"] == pytest.approx((abs(1 - 0.2) + abs(1 - 0.4)) / 4, abs=1e-6)
    of_subjects = {row["subject"]: row["methods"] for row in subjects_json(answers, names, **binning)}
    assert [of_subjects["a"][name]["ece"]["value"] for name in names] == [0, 0.5]
    ax = plot.risk_coverage({"methods": rows}, method="temperature")
    assert not len(ax.lines[0].get_xdata())


def test_answers(tmp_path):
    shape, n = (2, 5), 5
    rows = np.random.default_rng(0).random((3, *shape)).astype(np.float32)
    texts = np.array(["a", "\u00e9", "", "b c", "d"])
    answers = answer_files.Answers(
        *rows[:2], np.ones(shape, np.int32), rows[2], texts, {"em": rows[0, 0]}, np.zeros(n), 1, *[texts] * 3
    )
    file = tmp_path / "answers" / "task-part.npz"
    answer_files.write_answers(file, answers)
    got = answer_files.read_answers(file)
    for name in answer_files.Answers._fields:
        np.testing.assert_equal(getattr(got, name), getattr(answers, name), err_msg=name)
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-30], b"x" * 100):
        file.write_bytes(damaged)
        refused(file)
    for header in ("{'descr': '<f4', (", "{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,), }"):
        array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("confidence.npy", array)  # its checksum is right
        refused(file)


def refused(file):
    with pytest.raises(UserError, match=r"task-part.npz: not answers .*Remove this file to ask its questions again"):
        answer_files.read_answers(file)


def one_bit_each(whole):
    """Copies with one flipped bit in every byte."""
    return [whole[:i] + bytes([whole[i] ^ 1 << i % 7]) + whole[i + 1 :] for i in range(len(whole))]


def test_a_fit(tmp_path):
    file, fit = tmp_path / "answers" / "task.fit.json", answer_files.OptionTemperature((1.0, 0.5), 20, "train")
    answer_files.write_sealed(file, fit._asdict())
    assert answer_files.read_fit(file) == fit
    another = json.dumps(seal({"scales": [1]})).encode()
    for damaged in (b"", b"[]", another, *one_bit_each(file.read_bytes().strip())):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="Remove this file to fit it again"):
            answer_files.read_fit(file)


def test_samples(tmp_path):
    """Those that were drawn, or an error, whichever bit has changed."""
    file, drawn = tmp_path / "part-4.json", [[("a \u00e9", -1.25, 0.25, 0.5), ("", -0.5, 0.5, 0.5)]]
    answer_files.write_sealed(file, {"samples": drawn})
    assert answer_files.read_samples(file, 1, 2) == drawn
    fewer = json.dumps(seal({"samples": [[["a", -1.0, 0, 1]]]})).encode()
    for damaged in (b"", b"[", b"[]", fewer, *one_bit_each(file.read_bytes())):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"expected 2 samples .*Remove this file to draw them again"):
            answer_files.read_samples(file, 1, 2)


def test_answers_belong_to_a_model_its_heads_and_options(tmp_path):
    lm, other = make_lm(), make_lm(seed=1)
    heads = [{"ats": FittedHead.constant(lm, x)} for x in (0.1, 0.2)]
    answer_files.claim_answers(tmp_path, lm, heads[0])
    answer_files.claim_answers(tmp_path, lm, heads[0])
    low = make_lm(dtype="bfloat16")
    for others in ((other, heads[0]), (lm, heads[1]), (lm, {}), (low, heads[0]), (lm, heads[0], {"limit": 20})):
        with pytest.raises(UserError, match="its answers are of a model or head with other weights"):
            answer_files.claim_answers(tmp_path, *others)
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(UserError, match=r"model.json: not readable"):
        answer_files.claim_answers(tmp_path, lm, heads[0])
