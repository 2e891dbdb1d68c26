"""Files and directories appear as a whole or not at all, and nothing that we did not make is written or removed."""

import os
import stat
from pathlib import Path

import pytest

from calibjax.commands.run_directory import claim_directory
from calibjax.runtime import locks
from calibjax.runtime.errors import UserError, user_path
from calibjax.runtime.files import check_new_directory, new_directory, new_file, write_file


def tree(folder):
    """Every path below a folder, with what it is: the contents of a file, the target of a link, None."""

    def content(path):
        return os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


def ends_with(error, context, write, message=None):
    """Runs `write` in a context, then Ctrl-C where that is the error."""

    def run():
        with context as fresh:
            write(fresh)
            if error is KeyboardInterrupt:
                raise KeyboardInterrupt

    with pytest.raises(error, match=message):
        run()


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_a_file_is_written_as_a_whole(tmp_path, umask):
    file = tmp_path / "a.json"
    write_file(file, "é\n")
    assert tree(tmp_path) == {"a.json": "é\n".encode()}
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    write_file(file, b"\xff")
    assert tree(tmp_path) == {"a.json": b"\xff"}

    ends_with(KeyboardInterrupt, new_file(file), lambda fresh: fresh.write(b"half"))

    def failing(*reason):  # a write to a full disk names no file
        return lambda fresh: (_ for _ in ()).throw(OSError(*reason))

    ends_with(OSError, new_file(file), failing(28, "No space left on device"), "device: '/.*/a.json'$")
    ends_with(OSError, new_file(file), failing("a message alone"), "^a message alone$")
    ends_with(OSError, new_directory(tmp_path / "d"), lambda fresh: (fresh / "a" / "b").touch(), "directory: '/.*/d'$")
    assert tree(tmp_path) == {"a.json": b"\xff"}


def test_what_a_kill_leaves_of_a_claim(tmp_path):
    """A run whose first file was being written when it was killed can be started again; its leftover is not touched."""
    with new_file(tmp_path / "run.json") as fresh:
        left = Path(fresh.name).name
    (tmp_path / "run.json").rename(tmp_path / left)
    claim_directory(tmp_path, {"seed": 1})
    locks.release()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["run.json", left])
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json.new").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        claim_directory(tmp_path, {"seed": 1})


def test_a_file_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name, target in (("link", "mine"), ("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
        write_file(tmp_path / name, name)
    assert tree(tmp_path) == {name: name.encode() for name in ("mine", "link", "dangling", "loop")}


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder", Path(os.devnull)):
        with pytest.raises(UserError, match="expected a file"):
            write_file(path, "x")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "pipe"]


def test_a_long_name(tmp_path):
    """The temporary name is no longer than the file system takes."""
    name = "é" * 127
    write_file(tmp_path / name, "x")
    with new_directory(tmp_path / name[:-1]):
        pass
    assert sorted(tree(tmp_path)) == [name[:-1], name]


def fill(path, names=("a",), **options):
    with new_directory(path, **options) as fresh:
        for name in names:
            (fresh / name).write_text("new")


@pytest.mark.parametrize("existing", [False, True])
def test_a_directory_is_written_as_a_whole(tmp_path, monkeypatch, umask, existing):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.new").mkdir()
    (tmp_path / "model.new" / "weights").write_text("mine")
    if existing:
        (tmp_path / "model").mkdir()
    fill(Path("model"))
    foreign = {"model.new": None, "model.new/weights": b"mine"}
    assert tree(tmp_path) == {"model": None, "model/a": b"new"} | foreign
    if not existing:
        assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o777 & ~umask


def test_a_directory_is_replaced_only_by_its_like(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_text("old")
    before = tree(tmp_path)
    with pytest.raises(UserError, match="new or an empty directory, but it holds a"):
        fill(tmp_path / "d")
    with pytest.raises(UserError, match=r"not part of the new result \(a\)"):
        fill(tmp_path / "d", ["b"], replace=True)
    assert tree(tmp_path) == before
    fill(tmp_path / "d", ["a", "b"], replace=True)
    assert tree(tmp_path) == {"d": None, "d/a": b"new", "d/b": b"new"}


def test_what_came_meanwhile_is_kept(tmp_path):
    def write(fresh):
        (fresh / "a").write_text("new")
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "mine").write_text("mine")

    ends_with(UserError, new_directory(tmp_path / "d"), write, "holds mine")
    assert tree(tmp_path) == {"d": None, "d/mine": b"mine"}


def test_a_failed_rename_leaves_what_was_there(tmp_path, monkeypatch):
    fill(tmp_path / "d")
    before = tree(tmp_path)
    rename = Path.rename

    def failing(self, target):
        if self.suffix == ".new":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(UserError, match="No space left"):
        fill(tmp_path / "d", replace=True)
    assert tree(tmp_path) == before


def test_directories_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    before = tree(tmp_path)
    for name in ("file", "link", "loop", "x" * 300):
        for replace in (False, True):
            with pytest.raises(UserError, match=r"expected a new or an empty directory|cannot write there"):
                fill(tmp_path / name, replace=replace)
        with pytest.raises(UserError):
            check_new_directory(tmp_path / name)
    with pytest.raises(UserError, match="cannot write there"):
        fill(tmp_path / "file" / "x")

    ends_with(KeyboardInterrupt, new_directory(tmp_path / "new"), lambda fresh: (fresh / "a").write_text("half"))
    assert tree(tmp_path) == before


def test_home_is_expanded_where_there_is_no_such_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert user_path("~/a") == tmp_path / "a"
    assert user_path("~no-such-user/a") == Path("~no-such-user/a")
    (tmp_path / "~").mkdir()
    (tmp_path / "~" / "a").write_text("")
    assert user_path("~/a") == Path("~/a")
