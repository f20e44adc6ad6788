"""Preparing a model on the controller: the cache is checked by content, and survives what kills a run.

The conversion itself needs numpy and runs in its own environment; its result is pinned by digest
(Source.weights_sha256), so that every real run of it is its test. Here it is played by a small stand-in.
"""

import hashlib
import subprocess
import sys
from dataclasses import replace

import pytest
from gpu_fleet import model

NAME = "smollm2-135m-instruct"


@pytest.fixture
def conversion(monkeypatch, tmp_path):
    """A stand-in for fetching and converting that counts its runs; the cache is a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = []
    source = replace(model.SOURCES[NAME], weights_sha256=hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(model.SOURCES, NAME, source)
    monkeypatch.setattr(model, "tool_environment", lambda source, folder: "python")
    monkeypatch.setattr(model, "fetched", lambda source, python: tmp_path)

    def describe(source, python, folder):
        runs.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(model, "describe", describe)
    monkeypatch.setattr(model, "call", lambda *args, **kwargs: "")
    return runs


def test_made_once_then_taken_from_the_cache(conversion):
    first, second = model.prepare(NAME), model.prepare(NAME)
    assert first == second
    assert len(conversion) == 1
    assert sorted(path.name for path in first.iterdir()) == ["SHA256SUMS", "config.json", "model.safetensors"]


def test_sums_are_what_sha256sum_checks(conversion):
    folder = model.prepare(NAME)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "config.json").write_text("{ }"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "extra.py").write_text(""),
        lambda folder: (folder / "SHA256SUMS").unlink(),
        lambda folder: (folder / "SHA256SUMS").write_text(""),
    ],
)
def test_cache_that_was_altered_is_made_anew(conversion, harm):
    folder = model.prepare(NAME)
    harm(folder)
    assert model.broken(folder)
    assert model.prepare(NAME) == folder
    assert model.broken(folder) is None
    assert len(conversion) == 2


def test_leftovers_of_a_killed_run_are_removed(conversion):
    left = model.cache_folder() / f".new-{NAME}-killed"
    left.mkdir()
    model.prepare(NAME)
    assert [path.name for path in model.cache_folder().iterdir() if path.name.startswith(".new")] == []


def test_conversion_that_gives_other_weights_is_refused_and_leaves_nothing(conversion, monkeypatch):
    monkeypatch.setitem(model.SOURCES, NAME, replace(model.SOURCES[NAME], weights_sha256="0" * 64))
    with pytest.raises(model.ModelError, match="expected was 0000"):
        model.prepare(NAME)
    assert [path.name for path in model.cache_folder().iterdir()] == [f"{NAME}.lock"]


def test_into_gives_a_copy_and_puts_an_altered_copy_right(conversion, tmp_path):
    copy = model.prepare(NAME, tmp_path / "copy")
    (copy / "config.json").write_text("altered")
    assert model.prepare(NAME, copy) == copy
    assert (copy / "config.json").read_text() == "{}"
    assert (model.prepare(NAME) / "config.json").read_text() == "{}"


def test_into_never_replaces_a_folder_of_something_else(conversion, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(model.ModelError, match="is no prepared model"):
        model.prepare(NAME, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_second_user_waits_for_the_first(tmp_path):
    code = (
        "import sys, pathlib; sys.path.insert(0, 'scripts')\n"
        "from gpu_fleet import model\n"
        "with model.locked(pathlib.Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    root = model.HERE.parents[1]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": root}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout.readline() == "mine\n"
        with subprocess.Popen(command, **pipes) as second:
            assert "another run prepares it" in second.stderr.readline()
            first.stdin.close()
            assert second.stdout.readline() == "mine\n"
            second.stdin.close()


def test_unknown_name_is_refused_with_the_known_ones(capsys):
    assert model.main(["prepare", "gpt-5"]) == 2
    assert "known are smollm2-135m-instruct" in capsys.readouterr().err
