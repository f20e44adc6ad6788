"""The look at a big tree: what it must find, and what it must not read."""

import os
import time

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import tree


@pytest.fixture
def root(tmp_path):
    """A small tree with a folder, a link and an empty file."""
    folder = tmp_path / "model"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "deep" / "er" / "weights").write_bytes(os.urandom(3 << 20))
    (folder / "empty").touch()
    (folder / "link").symlink_to("config.json")
    return folder


def put_back_times(path, info):
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def paths(found):
    return [(item["path"], item["what"]) for item in found]


def test_untouched_tree_has_no_difference_and_nothing_is_read(root):
    recorded = tree.record(str(root))
    result = tree.examine(str(root), recorded)
    assert result.differences == []
    assert result.hashed == 0
    assert not result.refreshed


def test_record_holds_digest_and_stat(root):
    entry = tree.record(str(root))["files"]["deep/er/weights"]
    info = (root / "deep/er/weights").stat()
    assert entry["size"] == 3 << 20
    assert entry["mtime_ns"] == info.st_mtime_ns
    assert entry["ctime_ns"] == info.st_ctime_ns
    assert entry["inode"] == info.st_ino
    assert entry["mode"] == info.st_mode & 0o7777
    assert entry["sha256"] == tree.sha256(str(root / "deep/er/weights"))


def test_content_altered_in_place_with_times_restored_is_found(root):
    target = root / "deep/er/weights"
    recorded = tree.record(str(root))
    before = target.stat()
    with target.open("r+b") as handle:
        handle.seek(100)
        handle.write(b"x" * 8)
    put_back_times(target, before)
    assert target.stat().st_size == before.st_size
    assert target.stat().st_mtime_ns == before.st_mtime_ns
    assert paths(tree.differences(str(root), recorded)) == [("deep/er/weights", "altered")]


def test_change_right_after_the_record_is_found(root):
    """Within one clock tick size and times would stay equal, unless the record waits the tick out."""
    target = root / "config.json"
    for _ in range(20):
        target.write_text("{}")
        recorded = tree.record(str(root))
        before = target.stat()
        with target.open("r+b") as handle:
            handle.write(b"[]")
        put_back_times(target, before)
        assert paths(tree.differences(str(root), recorded)) == [("config.json", "altered")]


def test_file_replaced_by_another_of_the_same_size_is_found(root):
    recorded = tree.record(str(root))
    before = (root / "config.json").stat()
    (root / "other").write_text("[]")
    put_back_times(root / "other", before)
    os.replace(root / "other", root / "config.json")
    assert paths(tree.differences(str(root), recorded)) == [("config.json", "altered")]


def test_missing_and_extra_are_found(root):
    recorded = tree.record(str(root))
    (root / "empty").unlink()
    (root / "deep" / "new.py").write_text("")
    assert paths(tree.differences(str(root), recorded)) == [("deep/new.py", "extra"), ("empty", "missing")]


def test_mode_alone_is_found_with_both_modes_named(root):
    (root / "config.json").chmod(0o644)
    recorded = tree.record(str(root))
    (root / "config.json").chmod(0o600)
    (found,) = tree.differences(str(root), recorded)
    assert found == {"path": "config.json", "what": "altered", "detail": "mode 0600, recorded was 0644"}


def test_mode_of_a_folder_is_found(root):
    (root / "deep").chmod(0o755)
    recorded = tree.record(str(root))
    (root / "deep").chmod(0o700)
    assert paths(tree.differences(str(root), recorded)) == [("deep", "altered")]


def test_touched_file_is_no_difference_and_refreshes_the_record(root):
    recorded = tree.record(str(root))
    os.utime(root / "config.json")
    first = tree.examine(str(root), recorded)
    assert (first.differences, first.hashed, first.refreshed) == ([], 1, True)
    second = tree.examine(str(root), first.record)
    assert (second.differences, second.hashed, second.refreshed) == ([], 0, False)


def test_link_pointed_elsewhere_and_file_turned_into_a_link_are_found(root):
    recorded = tree.record(str(root))
    (root / "link").unlink()
    (root / "link").symlink_to("empty")
    (root / "empty").unlink()
    (root / "empty").symlink_to("config.json")
    assert paths(tree.differences(str(root), recorded)) == [("empty", "altered"), ("link", "altered")]


def test_special_file_is_named_and_never_opened(root):
    recorded = tree.record(str(root))
    (root / "empty").unlink()
    os.mkfifo(root / "empty")
    (found,) = tree.differences(str(root), recorded, rehash=True)
    assert found["detail"] == "a special file, recorded was a file"


def test_missing_root_makes_everything_missing(root, tmp_path):
    recorded = tree.record(str(root))
    found = tree.differences(str(tmp_path / "nowhere"), recorded)
    assert len(found) == 4
    assert {item["what"] for item in found} == {"missing"}


def test_rehash_reads_every_file(root):
    recorded = tree.record(str(root))
    assert tree.examine(str(root), recorded, rehash=True).hashed == 3


def test_rehash_finds_what_stat_cannot_show(root):
    recorded = tree.record(str(root))
    recorded["files"]["config.json"]["sha256"] = "0" * 64
    assert tree.differences(str(root), recorded) == []
    assert paths(tree.differences(str(root), recorded, rehash=True)) == [("config.json", "altered")]


def test_ignored_names_are_neither_recorded_nor_missed(root):
    ignore = ("__pycache__", ".complete")
    (root / "deep" / "__pycache__").mkdir()
    (root / "deep" / "__pycache__" / "a.pyc").write_text("1")
    (root / ".complete").write_text("1")
    recorded = tree.record(str(root), ignore)
    assert sorted(recorded["files"]) == ["config.json", "deep/er/weights", "empty", "link"]
    assert tree.differences(str(root), recorded, ignore=ignore) == []
    everything = tree.record(str(root))
    (root / "deep" / "__pycache__" / "a.pyc").unlink()
    assert tree.differences(str(root), everything, ignore=ignore) == []


def test_save_and_load_give_the_same_record(root, tmp_path):
    recorded = tree.record(str(root))
    tree.save(str(tmp_path / "record"), recorded)
    assert tree.load(str(tmp_path / "record")) == recorded
    assert tree.load(str(tmp_path / "none")) is None


@pytest.mark.parametrize("content", ["", '{"version":1', "[]", '{"version":1,"files":{}}', '{"version":9}'])
def test_broken_record_is_an_error_naming_the_file(tmp_path, content):
    (tmp_path / "record").write_text(content)
    with pytest.raises(tree.TreeError, match="record"):
        tree.load(str(tmp_path / "record"))


def test_record_of_no_folder_is_an_error(tmp_path):
    with pytest.raises(tree.TreeError, match="nowhere: No such file"):
        tree.record(str(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(tree.TreeError, match="not a folder"):
        tree.record(str(tmp_path / "file"))


def test_forty_thousand_files_are_looked_at_in_a_second(tmp_path):
    """The promise that lets a second run look instead of trusting a stamp; measured 0.3 s on two cores."""
    for folder in range(200):
        below = tmp_path / f"d{folder}"
        below.mkdir()
        for count in range(200):
            (below / f"f{count}").touch()
    files, directories = tree.look(str(tmp_path))
    recorded = {"files": {p: {**e, "sha256": "0" * 64} for p, e in files.items()}, "directories": directories}
    time.sleep(0.03)
    start = time.process_time()
    result = tree.examine(str(tmp_path), recorded)
    took = time.process_time() - start
    assert (result.differences, result.hashed) == ([], 0)
    assert took < 2.0, f"{took:.2f} s for 40,000 files"
