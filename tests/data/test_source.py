"""Reading sources: every kind of file, and every way in which one can be wrong."""

import gzip
import json

import datasets
import pyarrow.parquet
import pytest

from calibjax.data import read_source
from calibjax.data.table import read_table
from calibjax.data.write import write_rows
from calibjax.runtime.errors import UserError

ROWS = [{"text": "one", "n": 1}, {"text": "two\nlines", "n": 2}, {"text": "drei é", "n": 3}]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = b'text,n\none,1\n"two\nlines",2\ndrei \xc3\xa9,3\n'


def write(path, content: bytes):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


FILES = {"a.jsonl": JSONL, "a.json": json.dumps(ROWS).encode(), "a.csv": CSV}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_of_rows(tmp_path, name, suffix):
    rows = read_source(write(tmp_path / (name + suffix), FILES[name]))
    expected = [{"text": row["text"], "n": str(row["n"])} for row in ROWS] if name == "a.csv" else ROWS
    assert list(rows) == list(rows) == expected  # read anew
    assert (rows.first, rows.documents) == (expected[0], False)
    assert list(read_source(tmp_path / (name + suffix), rows=2)) == expected[:2]


def test_a_document_and_a_table_with_hostile_names(tmp_path):
    """A file of text is one document; words that look like nulls are kept, and columns of one name told apart."""
    rows = read_source(write(tmp_path / "a.txt.gz", b"\xef\xbb\xbf" + "one\n\ntwo é\n".encode()))
    assert (list(rows), rows.documents) == ([{"text": "one\n\ntwo é\n"}], True)
    rows = read_source(write(tmp_path / "a.csv", b"text,n,n,,\nNA,1,2,,\n"))
    assert list(rows) == [{"text": "NA", "n (2)": "1", "n (3)": "2", " (4)": "", " (5)": ""}]
    table = pyarrow.table([["NA"], [1], [2]], names=["text", "n", "n"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert list(read_source(tmp_path / "a.parquet")) == [{"text": "NA", "n (2)": 1, "n (3)": 2}]


def test_directory(tmp_path):
    for name, row in (("train_1.jsonl", ROWS[1]), ("train_0.jsonl.gz", ROWS[0]), ("valid.jsonl", ROWS[2])):
        write(tmp_path / name, json.dumps(row).encode())
    (tmp_path / "SOURCE.md").write_text("where it came from")
    assert list(read_source(tmp_path, split="train")) == ROWS[:2]
    assert list(read_source(tmp_path, split="train", rows=1)) == ROWS[:1]
    for split, message in (("test", r"split='test'.*valid\.jsonl"), (None, r"several splits: .*valid\.jsonl\. Choose")):
        with pytest.raises(UserError, match=message):
            read_source(tmp_path, split=split)
    (tmp_path / "valid.jsonl").rename(tmp_path / "valuable.jsonl")
    write(tmp_path / "train_1.jsonl.xz", b"a packed copy")
    assert list(read_source(tmp_path)) == ROWS
    for name in ("train_2.jsonl.zst", "train_2.arrow"):  # not left out without a word
        with pytest.raises(UserError, match=f"{name}: expected a file ending in one of .jsonl"):
            read_source(write(tmp_path / name, b"").parent, split="train")
        (tmp_path / name).unlink()
    write(tmp_path / "valuable.jsonl", b"null\n" + JSONL)
    assert list(read_source(tmp_path, rows=2)) == ROWS[:2]  # what follows is not read
    (tmp_path / "b.txt").write_text("a document")
    for rows, message in ((0, "rows: expected at least 1"), (1, "mixes whole documents")):
        with pytest.raises(UserError, match=message):
            read_source(tmp_path, rows=rows)


def test_directories_of_the_hub_and_of_datasets(tmp_path):
    """Files below data/, as a clone of the hub has them; and what `save_to_disk` wrote, of one split and of several."""
    parts = {name: datasets.Dataset.from_list(ROWS[n:]) for n, name in enumerate(("train", "test"))}
    for name, part in parts.items():
        part.to_parquet(tmp_path / f"clone/data/{name}-00000-of-00001.parquet")
        part.to_parquet(tmp_path / f"clone/data/.ipynb_checkpoints/{name}-checkpoint.parquet")
        part.to_parquet(tmp_path / f"folders/{name}/0.parquet")
    (tmp_path / "clone/dataset_infos.json").write_text('{"default": {"features": {}}}')
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "several")
    parts["test"].save_to_disk(tmp_path / "one")
    for folder in ("clone", "folders", "several"):
        assert list(read_source(tmp_path / folder, split="train")) == ROWS
        rows = read_source(tmp_path / folder, split="test", skip_broken=True)
        assert (list(rows), rows.skip_broken) == (ROWS[1:], True)
        with pytest.raises(UserError, match=r"several splits: .*train.* Choose one"):
            read_source(tmp_path / folder)
    assert list(read_source(tmp_path / "one")) == ROWS[1:]
    with pytest.raises(UserError, match="has no splits"):
        read_source(tmp_path / "one", split="test")
    for folder in ("x", "y"):  # parts of one set, by Spark
        parts["train"].to_parquet(tmp_path / "spark" / folder / "part-00000-of-00001.parquet")
    assert list(read_source(tmp_path / "spark")) == ROWS * 2
    # Configurations: as README.md lists them; without it, where each of several files holds the whole split.
    names, clone = ("main", "socratic", "*"), tmp_path / "configurations"
    for name in names[:2]:
        parts["train"].to_parquet(clone / name / "train-00000-of-00001.parquet")
    configs = [{"config_name": name, "data_files": [{"split": "train", "path": f"{name}/train-*"}]} for name in names]
    for listed in (0, 2, 3):
        (clone / "README.md").write_text(f"---\nconfigs: {json.dumps(configs[:listed])}\n---\n")
        if listed < 3:
            with pytest.raises(UserError, match=rf"configurations: main, socratic\. .*{clone}/main"):
                read_source(clone, split="train")
    assert [list(read_source(clone / name)) for name in ("", "main")] == [ROWS * 2, ROWS]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_encodings(tmp_path, encoding):
    """The same rows, or a refusal that names what it is."""
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    for name, content in FILES.items():
        rows = read_source(write(tmp_path / f"{name}.gz", (mark + content.decode()).encode(encoding)))
        assert [(row["text"], int(row["n"])) for row in rows] == [(row["text"], row["n"]) for row in ROWS]
    if mark:
        with pytest.raises(UserError, match="NUL bytes, as UTF-16 without a byte order mark"):
            read_source(write(tmp_path / "b.csv", CSV.decode().encode(encoding)))


@pytest.mark.parametrize("folder", ["[w]", "x?*{y}#%41", "file:", "~", "a::b?", "correct=1"])
def test_a_path_that_exists_is_that_path(tmp_path, monkeypatch, folder):
    """Beside a file that it would match as a pattern; absolute, relative, and as the only file of a directory."""
    (tmp_path / folder).mkdir()
    (tmp_path / "d1.jsonl").write_text("decoy")
    file = write(tmp_path / folder / "d[12].jsonl", JSONL)
    monkeypatch.chdir(tmp_path)
    for path in (file, f"{folder}/d[12].jsonl", folder):
        assert list(read_source(path)) == ROWS
    answers = [{"confidence": n / 16, "correct": n % 2} for n in range(16)]
    for suffix in (".csv", ".parquet", ".jsonl", ".npz"):
        file = tmp_path / folder / f"t[12]*{suffix}"
        write_rows(file, lambda: iter(answers))
        (tmp_path / folder / f"t1{suffix}").write_text("decoy")
        for path in (file, f"{folder}/{file.name}"):
            assert read_table(path).predictions.confidence.tolist() == [row["confidence"] for row in answers]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "one"}\n\n{"text": "tw', r"a\.jsonl, line 3: cannot be read .*: '{\"text\": \"tw'"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "\xff"}', r"line 2: invalid UTF-8 at byte 10 of the line"),
        ("a.jsonl", b"[" * 100_000, r"line 1: cannot be read as json"),
        ("a.json", b"null", r"line 1: expected a JSON object, got 'null'"),
        ("a.json", b'[{"text": "one"}, null]', r"row 1 .*: expected a JSON object, got 'None'"),
        ("a.json", b'[{"text": "one"},', "cannot be read as json"),
        ("a.csv", b"text,n\none,1\ntwo\n", r"line 3: expected 2 cells separated by ',', as in the first line, got 1"),
        ("a.csv", b'text,n\n"one\n\n",1\n\xff,2\n', r"line 5: invalid UTF-8"),
        ("a.csv", b'text,n\n"one\n\n",1\nx,"2\ny,3\n', r"line 5: unexpected end"),
        ("a.tsv", b'n\ttext\n1\t"one\n2\ttwo\n3\t"three\n', r"line 2: .* expected after"),
        ("a.parquet", b"no parquet", r"a\.parquet cannot be read as parquet"),
        ("cut.jsonl.gz", gzip.compress(JSONL * 1000, mtime=0)[:-40], "cannot be read as gzipped json"),
        ("plain.jsonl.gz", JSONL, "cannot be read as gzipped json"),
        ("a.txt", "é".encode("latin1"), "cannot be read as text"),
        ("a.jsonl", b"", "holds no rows"),
        ("a.csv", b"text,n\n", "holds no rows"),
        ("a.xml", b"<a/>", r"expected a file ending in one of \.jsonl"),
    ],
)
def test_bad_contents(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_source(tmp_path / name))


def test_the_hub(monkeypatch):
    """What is asked of it; offline the cache is read, which has no streaming."""
    calls = []

    def load(*args, **options):
        calls.append((args, options["split"], options["revision"], options["streaming"]))
        if args[0] == "someone/nothing":
            raise ConnectionError("no route")
        return iter(ROWS) if options["streaming"] else datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    for offline in (False, True):
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
        rows = read_source("someone/texts", split="test", rows=2, skip_broken=True)
        assert (list(rows), rows.skip_broken) == (ROWS[:2], True)
    assert list(read_source("someone/texts:small@v1.0")) == ROWS
    assert calls == [
        (("someone/texts", None), "test", None, True),
        (("someone/texts", None), "test", None, False),
        (("someone/texts", "small"), "train", "v1.0", False),
    ]
    with pytest.raises(UserError, match=r"neither a local file or directory nor .*no route"):
        read_source("someone/nothing")
