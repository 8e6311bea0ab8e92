"""Where `make test-dnnl` may make its root, of which it deletes things with the rights of root, and what it copies."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dnnl.root import MADE, MARKER, PROJECT, begin, copy_project, is_made, refusal


class TestRefusal:
    def test_a_new_or_empty_directory_is_free(self, tmp_path: Path) -> None:
        assert refusal(tmp_path / "new" / "root") is None
        assert refusal(tmp_path) is None

    def test_somebody_s_directory_is_not(self, tmp_path: Path) -> None:
        (tmp_path / "src").mkdir()
        assert f"no {MARKER}" in (refusal(tmp_path) or "")
        (tmp_path / MADE).touch()  # a file that other programs write, too
        assert f"no {MARKER}" in (refusal(tmp_path) or "")
        with pytest.raises(FileExistsError, match=MARKER):
            begin(tmp_path)
        assert (tmp_path / "src").is_dir()

    def test_nor_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "not a directory" in (refusal(tmp_path / "file") or "")

    @pytest.mark.parametrize("place", [PROJECT, *PROJECT.parents], ids=str)
    def test_the_project_and_what_holds_it_never_are(self, place: Path) -> None:
        assert "holds this project" in (refusal(place) or "")

    def test_not_even_marked(self, tmp_path: Path) -> None:
        project = tmp_path / "projects" / "this"
        project.mkdir(parents=True)
        for place in (project, tmp_path / "projects", tmp_path):
            (place / MARKER).touch()
            assert "holds this project" in (refusal(place, project) or "")
        assert refusal(project / ".root", project) is None


class TestBegin:
    def test_a_half_made_root_is_begun_anew(self, tmp_path: Path) -> None:
        root, other = tmp_path / "some" / "root", tmp_path / "other"
        other.mkdir()
        (other / "letter").touch()
        begin(root)
        (root / "usr" / "bin").mkdir(parents=True)
        (root / "usr" / "bin" / "env").touch()
        (root / "file").touch()
        (root / "link").symlink_to(other)
        assert refusal(root) is None
        assert not is_made(root)
        begin(root)
        assert {path.name for path in root.iterdir()} == {MARKER, ".gitignore"}
        assert (other / "letter").exists()

    def test_a_whole_one_is_kept(self, tmp_path: Path) -> None:
        begin(tmp_path)
        (tmp_path / MADE).touch()
        assert refusal(tmp_path) is None
        assert is_made(tmp_path)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_git_knows_is_copied(tmp_path: Path) -> None:
    project, copy = tmp_path / "project", tmp_path / "project" / "here" / "src"
    for name in ("a/kept.py", "a/deleted.py", "new.py", "ignored/big", "ümlaut"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    (project / ".gitignore").write_text("ignored/\n")
    (project / "link").symlink_to("a")
    (project / "nowhere").symlink_to("gone")
    for command in (("init", "--quiet"), ("add", "a", ".gitignore", "link", "nowhere")):
        subprocess.run(("git", "-C", project, *command), check=True)
    (project / "a" / "deleted.py").unlink()
    begin(project / "here")
    begin(project / "there")
    (project / "there" / "file").touch()
    copy_project(copy, project)
    found = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_symlink() or path.is_file()}
    assert found == {"a/kept.py", "new.py", "ümlaut", ".gitignore", "link", "nowhere"}
    assert (os.readlink(copy / "link"), os.readlink(copy / "nowhere")) == ("a", "gone")
