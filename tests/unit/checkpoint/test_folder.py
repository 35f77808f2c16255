"""A checkpoint whose files another library has written: its manifest knows their names, sizes and checksums."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.checkpoint.folder import (
    SavedFile,
    damage_of,
    fingerprint,
    hidden_folder,
    open_folder,
    publish,
    read_manifest,
)
from paceline.checkpoint.keep import load, set_aside, tags
from paceline.errors import CheckpointDamaged, CheckpointFailed
from paceline_protocol import Tag

TAG = Tag(2, 7)


def written(directory: Path, tag: Tag = TAG, attempt: str = "a1") -> list[SavedFile]:
    """Writes two files of another library into the folder of an attempt."""
    open_folder(directory, tag, attempt)
    hidden = hidden_folder(directory, tag, attempt)
    contents = {".metadata": b"table", "__0_0.distcp": bytes(3 << 20)}
    for name, content in contents.items():
        (hidden / name).write_bytes(content)
    return [SavedFile.of(hidden / name) for name in contents]


def test_a_checkpoint_of_another_librarys_files_is_found_and_verified(tmp_path: Path) -> None:
    files = written(tmp_path)
    folder = publish(tmp_path, TAG, "a1", (), "a1", files)
    assert tags(tmp_path) == [TAG]
    assert read_manifest(folder).files == tuple(files)
    assert damage_of(folder) is None
    for file in files:
        file.verify(folder)


def test_a_changed_file_is_damage_and_a_shorter_one_is_seen_at_once(tmp_path: Path) -> None:
    folder = publish(tmp_path, TAG, "a1", (), "a1", files := written(tmp_path))
    data = folder / files[1].name
    data.write_bytes(bytes(3 << 20)[:-1] + b"x")
    assert damage_of(folder) is None
    with pytest.raises(CheckpointDamaged, match=r"__0_0\.distcp has other bytes than were written"):
        files[1].verify(folder)
    data.write_bytes(b"short")
    assert "has 5 bytes, not 3145728" in str(damage_of(folder))
    data.unlink()
    with pytest.raises(CheckpointDamaged, match="is missing"):
        files[1].verify(folder)


def test_a_file_that_is_not_there_is_not_published(tmp_path: Path) -> None:
    files = written(tmp_path)
    (hidden_folder(tmp_path, TAG, "a1") / files[0].name).unlink()
    with pytest.raises(CheckpointFailed, match=r"\.metadata is not in .*all ranks share"):
        publish(tmp_path, TAG, "a1", (), "a1", files)
    assert tags(tmp_path) == []


def test_two_attempts_at_one_tag_have_other_fingerprints(tmp_path: Path) -> None:
    """Their states may differ, as those of two runs do."""
    found = set()
    for attempt in ("a1", "a2"):
        directory = tmp_path / attempt
        found.add(fingerprint(publish(directory, TAG, attempt, (), attempt, written(directory, TAG, attempt))))
    assert len(found) == 2


def test_older_checkpoints_of_another_librarys_files_are_set_aside(tmp_path: Path) -> None:
    for step in range(1, 4):
        publish(tmp_path, Tag(1, step), "a1", (), "a1", written(tmp_path, Tag(1, step)))
    set_aside(tmp_path, 2, Tag(1, 3))
    assert tags(tmp_path) == [Tag(1, 2), Tag(1, 3)]


def test_plain_workers_leave_a_checkpoint_of_replicas_out_and_say_why(tmp_path: Path) -> None:
    publish(tmp_path, TAG, "a1", (), "a1", written(tmp_path))
    with pytest.raises(CheckpointDamaged, match="is a checkpoint of replicas, which torch"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../a", "a/b", "a b", "a" * 200])
def test_a_manifest_that_names_a_file_elsewhere_is_damaged(name: str, tmp_path: Path) -> None:
    open_folder(tmp_path, TAG, "a1")
    path = hidden_folder(tmp_path, TAG, "a1") / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"there")
    folder = publish(tmp_path, TAG, "a1", (), "a1", [SavedFile(name, 5, 0)])
    with pytest.raises(CheckpointDamaged, match="not a file's name, size and checksum"):
        read_manifest(folder)
