"""Delivering a model: the folder is the former one or the new one, whatever goes wrong between."""

import hashlib
import os
import shutil

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import models
from ansible_collections.gpu_fleet.vllm.plugins.modules import model_files

NAME = "chat"


def manifest_of(content):
    return {path: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in content.items()}


V1 = {"config.json": b"{}", "deep/vocabulary.txt": b"a b", "model.safetensors": b"1" * 5000}
V2 = {"config.json": b"{}", "model.safetensors": b"2" * 6000, "new.json": b"[]"}


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    return str(folder)


def bring(store, content, only=None):
    """What the controller does: into the staging folder."""
    manifest = manifest_of(content)
    need = models.examine(store, NAME, manifest).need
    staging = models.prepare_staging(store, NAME, need, models.staged(store, NAME, manifest, need), os.geteuid())
    for path in need if only is None else only:
        with open(os.path.join(staging, path), "wb") as handle:
            handle.write(content[path])
    return manifest, need


def deliver(store, content):
    manifest, need = bring(store, content)
    models.install(store, NAME, manifest, need)
    return need


def there(store):
    root = os.path.join(store, NAME)
    found = {}
    for where, _dirs, names in os.walk(root):
        for name in names:
            path = os.path.join(where, name)
            with open(path, "rb") as handle:
                found[os.path.relpath(path, root)] = handle.read()
    return found


def test_delivered_model_is_whole_readable_and_leaves_nothing_beside(store):
    deliver(store, V1)
    assert there(store) == V1
    assert sorted(os.listdir(store)) == [".chat.record.json", "chat"]
    assert os.stat(os.path.join(store, NAME, "deep")).st_mode & 0o777 == 0o755
    assert os.stat(os.path.join(store, NAME, "config.json")).st_mode & 0o777 == 0o644


def test_second_look_finds_nothing_and_reads_nothing(store):
    deliver(store, V1)
    look = models.examine(store, NAME, manifest_of(V1))
    assert (look.faults, look.need, look.hashed) == ([], [], 0)


def test_another_version_brings_only_what_differs_and_drops_what_is_gone(store):
    deliver(store, V1)
    inode = os.stat(os.path.join(store, NAME, "config.json")).st_ino
    assert sorted(deliver(store, V2)) == ["model.safetensors", "new.json"]
    assert there(store) == V2
    assert os.stat(os.path.join(store, NAME, "config.json")).st_ino == inode


@pytest.mark.parametrize(
    ("harm", "need", "word"),
    [
        (lambda root: os.unlink(f"{root}/config.json"), ["config.json"], "missing"),
        (lambda root: open(f"{root}/extra.py", "w").close(), [], "extra"),
        (lambda root: os.chmod(f"{root}/config.json", 0o600), [], "mode 0600"),
        (lambda root: os.chmod(f"{root}/deep", 0o700), [], "0700"),
        (lambda root: shutil.rmtree(f"{root}/deep"), ["deep/vocabulary.txt"], "missing"),
        (lambda root: os.unlink(f"{os.path.dirname(root)}/.chat.record.json"), [], "had no usable record"),
        (lambda root: open(f"{os.path.dirname(root)}/.chat.record.json", "w").close(), [], "had no usable record"),
        (shutil.rmtree, sorted(V1), "missing"),
    ],
)
def test_what_hands_altered_is_found_and_put_right(store, harm, need, word):
    deliver(store, V1)
    harm(os.path.join(store, NAME))
    look = models.examine(store, NAME, manifest_of(V1))
    assert any(word in fault for fault in look.faults), look.faults
    assert sorted(deliver(store, V1)) == need
    assert there(store) == V1
    assert models.examine(store, NAME, manifest_of(V1)).faults == []


def test_same_size_same_time_other_content_is_found(store):
    deliver(store, V1)
    path = os.path.join(store, NAME, "model.safetensors")
    info = os.stat(path)
    with open(path, "r+b") as handle:
        handle.write(b"X")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert deliver(store, V1) == ["model.safetensors"]
    assert there(store) == V1


def test_file_that_did_not_arrive_as_sent_leaves_the_former_model(store):
    deliver(store, V1)
    manifest, need = bring(store, V2)
    with open(os.path.join(models.staging_path(store, NAME), "model.safetensors"), "ab") as handle:
        handle.write(b"!")
    with pytest.raises(models.ModelError, match=r"model.safetensors did not arrive as it was sent"):
        models.install(store, NAME, manifest, need)
    assert there(store) == V1
    assert models.examine(store, NAME, manifest_of(V1)).faults == []


def test_interrupted_delivery_is_continued_with_what_is_missing(store):
    deliver(store, V1)
    bring(store, V2, only=["model.safetensors"])
    assert there(store) == V1
    manifest = manifest_of(V2)
    need = models.examine(store, NAME, manifest).need
    assert models.staged(store, NAME, manifest, need) == ["model.safetensors"]
    models.prepare_staging(store, NAME, ["new.json"], ["model.safetensors"], os.geteuid())
    with open(os.path.join(models.staging_path(store, NAME), "new.json"), "wb") as handle:
        handle.write(V2["new.json"])
    models.install(store, NAME, manifest, need)
    assert there(store) == V2


def test_half_a_file_of_an_interrupted_delivery_is_not_taken(store):
    manifest, need = bring(store, V1)
    with open(os.path.join(models.staging_path(store, NAME), "model.safetensors"), "wb") as handle:
        handle.write(b"1" * 100)
    assert "model.safetensors" not in models.staged(store, NAME, manifest, need)


@pytest.mark.parametrize("killed_in", ["_take_over", "_set_access", "_sync", "swap", "tree.record_known", "tree.save"])
def test_killed_at_any_step_the_model_is_the_former_or_the_new_one(store, monkeypatch, killed_in):
    deliver(store, V1)
    manifest, need = bring(store, V2)

    def killed(*_args, **_kwargs):
        raise KeyboardInterrupt

    holder, _, name = killed_in.rpartition(".")
    with monkeypatch.context() as patch:
        patch.setattr(models.tree if holder else models, name, killed)
        with pytest.raises(KeyboardInterrupt):
            models.install(store, NAME, manifest, need)
    assert there(store) in (V1, V2)
    models.recover(store, NAME)
    deliver(store, V2)
    assert there(store) == V2
    assert sorted(os.listdir(store)) == [".chat.record.json", "chat"]


def test_swap_without_the_kernels_help_can_be_recovered(store):
    deliver(store, V1)
    os.rename(os.path.join(store, NAME), models.old_path(os.path.join(store, NAME)))
    models.recover(store, NAME)
    assert there(store) == V1


def test_full_disk_names_need_and_free(store, monkeypatch):
    monkeypatch.setattr(models, "space", lambda _store: (5 << 30, 100 << 30))
    with pytest.raises(
        models.ModelError, match=r"20.0 GiB have to come .* 5.0 GiB are free there and 1.0 GiB are to stay free"
    ):
        models.check_space(store, NAME, 20 << 30)
    models.check_space(store, NAME, 3 << 30)
    models.check_space(store, NAME, 0)


def test_link_in_the_models_place_is_replaced_and_its_target_left_alone(store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("1")
    os.symlink(tmp_path / "elsewhere", os.path.join(store, NAME))
    deliver(store, V1)
    assert there(store) == V1
    assert (tmp_path / "elsewhere" / "mine").exists()
    assert sorted(os.listdir(store)) == [".chat.record.json", "chat"]


def test_pickles_are_left_out_beside_safetensors():
    content = models.choose(
        NAME, ["a.safetensors", "pytorch_model.bin", "x/optimizer.PT", ".git/HEAD", "own.py"], allow_pickle=False
    )
    assert content.files == ["a.safetensors", "own.py"]
    assert ["pytorch_model.bin, x/optimizer.PT left out" in content.notes[0], "own.py" in content.notes[1]] == [
        True,
        True,
    ]


def test_pickles_alone_are_refused_unless_allowed():
    with pytest.raises(models.ModelError, match="model_store_allow_pickle: true"):
        models.choose(NAME, ["config.json", "pytorch_model.bin"], allow_pickle=False)
    assert models.choose(NAME, ["pytorch_model.bin"], allow_pickle=True).files == ["pytorch_model.bin"]


def test_empty_source_is_refused():
    with pytest.raises(models.ModelError, match="has no file"):
        models.choose(NAME, [".gitattributes"], allow_pickle=False)


def test_left_over_folders_are_named(store):
    deliver(store, V1)
    os.mkdir(os.path.join(store, "old"))
    assert models.left_over(store, [NAME]) == ["old"]
    assert models.left_over(os.path.join(store, "nowhere"), []) == []


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"), (3 << 40, "3.0 TiB")])
def test_sizes_for_people(count, text):
    assert models.size(count) == text


class Module:
    def __init__(self, check_mode=False):
        self.check_mode, self.params = check_mode, {"rehash": False, "owner": None}


def test_what_has_to_come_of_all_models_is_added_up(store, monkeypatch):
    monkeypatch.setattr(models, "space", lambda _store: (1 << 30, 1 << 30))
    weights = {"model.safetensors": {"size": 600 << 20, "sha256": "0" * 64}}
    assert model_files.look(Module(), store, {"one": weights})["need"] == {"one": ["model.safetensors"]}
    shutil.rmtree(models.staging_path(store, "one"))
    with pytest.raises(models.ModelError, match=r"one, two does not fit: 1\.2 GiB have to come"):
        model_files.look(Module(), store, {"one": weights, "two": weights})
    assert os.listdir(store) == []


def test_a_store_that_a_hardened_umask_closed_is_opened_and_said(store):
    deliver(store, V1)
    wanted = {NAME: manifest_of(V1)}
    assert model_files.look(Module(), store, wanted)["faults"] == {}
    os.chmod(store, 0o700)
    assert model_files.look(Module(check_mode=True), store, wanted)["faults"] == {
        NAME: [f"{store}: access 0700, wanted 0755"]
    }
    assert os.stat(store).st_mode & 0o777 == 0o700
    assert model_files.look(Module(), store, wanted)["need"] == {NAME: []}
    assert os.stat(store).st_mode & 0o777 == 0o755
    model_files.install(store, wanted)
    assert there(store) == V1
    assert model_files.look(Module(), store, wanted)["faults"] == {}


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("m", "it is 'm', not a list"),
        (["m"], "entry 1: it is 'm', which is no model"),
        ([{"folder": "/m"}], "entry 1: the name is 'missing'"),
        ([{"name": "a/b", "folder": "/m"}], "the name is 'a/b'"),
        ([{"name": "m"}], "model m: it has neither of two sources"),
        (
            [{"name": "m", "folder": "/m", "hub": "org/m", "revision": COMMIT}],
            "model m: it has both of two sources: give either folder (of the controller)",
        ),
        ([{"name": "m", "hub": "org/m"}], "model m: revision is missing"),
        ([{"name": "m", "hub": "org/m", "revision": "main"}], "revision 'main' is not a commit of 40 hex digits"),
        ([{"name": "m", "hub": "org/m", "revision": "abc"}], "https://hub.example/org/m/commits/main"),
        ([{"name": "m", "hub": "org/m", "revision": int("1" * 40)}], "Put it in quotes"),
        ([{"name": "m", "hub": "m", "revision": COMMIT}], "hub 'm' is no ORGANISATION/NAME"),
        ([{"name": "m", "folder": 7}], "folder is 7, which is no text"),
        (
            [{"name": "m", "hub": "org/m", "revison": COMMIT, "revision": COMMIT}],
            "unknown key revison. Did you mean revision?",
        ),
        ([{"name": "m", "folder": "/m"}, {"name": "m", "folder": "/n"}], "two models are called m (entries 1 and 2"),
    ],
)
def test_a_list_of_models_that_cannot_be_delivered(entries, words):
    found = models.judge(entries, "https://hub.example")
    assert [finding.severity for finding in found] == ["error"]
    assert words in str(found[0])


def test_every_mistake_of_a_list_of_models_is_said():
    found = models.judge([{"name": "m", "hub": "x", "revision": "main", "z": 1}, {"name": "m"}])
    assert len(found) == 5, [str(finding) for finding in found]


def test_a_right_list_of_models_and_the_placeholder():
    right = [{"name": "m", "folder": "/nowhere"}, {"name": "n", "hub": "org/n", "revision": COMMIT}]
    assert models.judge(right) == []
    (note,) = models.judge([{"name": "n", "hub": "org/n", "revision": "0" * 40}])
    assert note.severity == "warning"
    assert "cannot be deployed" in str(note)
