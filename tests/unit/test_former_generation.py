"""Which generation a rollback brings back."""

import os
from types import SimpleNamespace

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.modules import former_generation

OLD, NEW = "0" * 12, "1" * 12


class Failed(Exception):
    pass


class Ended(Exception):
    pass


@pytest.fixture
def look(tmp_path, monkeypatch):
    """An instance that was changed from OLD to NEW; call it for what the module says."""
    home = tmp_path / "chat.0"
    release = tmp_path / "releases/0.26.0-cpu-x"
    release.mkdir(parents=True)
    (release / ".complete").write_text("{}")
    for when, name in enumerate((OLD, NEW)):
        folder = home / "generations" / name
        folder.mkdir(parents=True)
        for file in former_generation.NEEDED:
            (folder / file).write_text("x")
            os.utime(folder / file, (when + 1, when + 1))
        (folder / "release").symlink_to(release)
    link(home, "current", NEW)
    link(home, "previous", OLD)
    unit = SimpleNamespace(active="active", running=True, generation=NEW)
    said = {}

    class Module:
        def __init__(self, **_):
            self.check_mode, self.params = False, {"instance": "chat.0", "root": str(tmp_path)}

        def exit_json(self, **result):
            said.update(result)
            raise Ended

        def fail_json(self, msg):
            raise Failed(msg)

    monkeypatch.setattr(former_generation, "AnsibleModule", Module)
    monkeypatch.setattr(former_generation.units, "show", lambda _instance: unit)

    def run():
        said.clear()
        with pytest.raises(Ended):
            former_generation.main()
        return dict(said)

    run.home, run.unit, run.release = home, unit, release
    return run


def link(home, name, identifier):
    if os.path.lexists(home / name):
        os.unlink(home / name)
    os.symlink(os.path.join("generations", identifier), home / name)


def test_it_is_the_one_before_the_last_change(look):
    said = look()
    assert (said["id"], said["back"], said["settled"], said["release"]) == (OLD, False, False, "0.26.0-cpu-x")
    assert said["restart_reasons"] == [f"it runs generation {NEW}, the former is {OLD}"]


def test_a_second_rollback_does_not_go_forward(look):
    link(look.home, "current", OLD)
    link(look.home, "previous", NEW)
    look.unit.generation = OLD
    said = look()
    assert (said["id"], said["back"], said["settled"], said["restart_reasons"]) == (OLD, True, True, [])


def test_one_that_was_cut_off_after_the_switch_is_started(look):
    link(look.home, "current", OLD)
    link(look.home, "previous", NEW)
    look.unit.active, look.unit.running, look.unit.generation = "inactive", False, None
    said = look()
    assert (said["id"], said["settled"], said["restart_reasons"]) == (OLD, False, [])


def test_without_a_former_one_nothing_is_changed(look):
    os.unlink(look.home / "previous")
    with pytest.raises(Failed, match=r"there is no former generation.*Nothing was changed.*run site.yml"):
        former_generation.main()


def test_a_release_that_was_taken_away_is_named(look):
    (look.release / ".complete").unlink()
    with pytest.raises(
        Failed, match=f"the release of its former generation {OLD}, .*0.26.0-cpu-x, is gone or not whole"
    ):
        former_generation.main()


def test_a_file_that_is_missing_is_named(look):
    (look.home / "generations" / OLD / "env").unlink()
    with pytest.raises(Failed, match=f"its former generation {OLD} lacks env"):
        former_generation.main()
