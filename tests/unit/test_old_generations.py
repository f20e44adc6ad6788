"""Which generations of an instance go, which stay, and what is none of ours."""

import os
from types import SimpleNamespace

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.modules import instance, old_generations

IDS = [f"{number:012x}" for number in range(1, 7)]  # the oldest first


class Ended(Exception):
    pass


@pytest.fixture
def host(tmp_path, monkeypatch):
    """An instance with six generations, each with a cache; call it to have the old ones taken away."""
    home, caches = tmp_path / "etc/chat.0", tmp_path / "cache/chat.0"
    for number, name in enumerate(IDS):
        folder = home / "generations" / name
        folder.mkdir(parents=True)
        (folder / "unit.conf").write_text(f"# Generation {name} of chat.0, rank 0. Unit: d\n")
        (caches / name / "triton").mkdir(parents=True)
        os.utime(folder, (number, number))
    answer = {}

    class Module:
        def __init__(self, **_):
            self.check_mode, self.params = answer["check"], answer["params"]

        def exit_json(self, **result):
            answer.update(result)
            raise Ended

        def fail_json(self, **result):
            raise AssertionError(result)

    monkeypatch.setattr(old_generations, "AnsibleModule", Module)

    def run(current=IDS[5], *, previous=None, running=None, wanted=None, keep=3, check=False):
        for link, name in (("current", current), ("previous", previous)):
            if name:
                instance.point(str(home / link), f"generations/{name}")
        monkeypatch.setattr(old_generations.units, "show", lambda _: SimpleNamespace(generation=running))
        params = {"instance": "chat.0", "generation": wanted or current, "keep": keep}
        answer.clear()
        answer.update(check=check, params={**params, "root": str(tmp_path / "etc"), "cache": str(tmp_path / "cache")})
        with pytest.raises(Ended):
            old_generations.main()
        return answer

    run.home, run.caches = home, caches
    return run


def left(host):
    return sorted(os.listdir(host.home / "generations")), sorted(os.listdir(host.caches))


def test_the_newest_stay_and_a_second_run_changes_nothing(host):
    assert host()["changed"]
    assert left(host) == (IDS[3:], IDS[3:])
    assert not host()["changed"]


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_what_is_current_was_before_or_runs_stays_however_old(host, keep):
    answer = host(current=IDS[1], previous=IDS[0], running=IDS[2], keep=keep)
    assert left(host) == (IDS[:3], IDS[:3])
    assert answer["kept"] == IDS[:3]


def test_check_mode_says_what_goes_as_if_it_were_switched(host):
    before = left(host)
    said = host(current=IDS[4], previous=IDS[0], wanted="f" * 12, running=IDS[4], check=True)
    assert said["changed"]
    assert left(host) == before
    gone = [path for path in said["removed"] if "/generations/" in path]
    # the wanted one, the one before it, and the newest other
    assert [os.path.basename(path) for path in gone] == IDS[:4]


def test_what_others_made_is_left_alone(host):
    (host.home / "generations/backup").mkdir()
    (host.home / "generations" / IDS[0] / "unit.conf").write_text("# mine\n")
    os.symlink("/etc", host.home / "generations/aaaaaaaaaaaa")
    (host.caches / "notes").mkdir()
    host()
    assert left(host) == (sorted([IDS[0], *IDS[3:], "aaaaaaaaaaaa", "backup"]), sorted([IDS[0], *IDS[3:], "notes"]))


def test_a_cache_without_a_generation_goes(host):
    (host.caches / ("e" * 12)).mkdir()
    host()
    assert left(host)[1] == IDS[3:]


def test_an_instance_that_is_not_there_yet(host):
    for name in ("etc", "cache"):
        os.rename(host.home.parents[1] / name, host.home.parents[1] / f"{name}.away")
    answer = host(current=None, wanted=IDS[0], check=True)
    assert not answer["changed"]


def test_a_start_remembers_the_generation_before(tmp_path, monkeypatch):
    unit = SimpleNamespace(sub="dead", active="inactive", name="u", invocation="")
    monkeypatch.setattr(instance, "call", lambda *_: None)
    monkeypatch.setattr(instance.units, "show", lambda _: SimpleNamespace(invocation="i"))
    monkeypatch.setattr(instance, "AGENT", str(tmp_path / "agent"))
    link = tmp_path / "current"
    for name in (IDS[0], IDS[1], IDS[1]):
        parameters = {"generation": name, "instance": "chat.0", "timeout": 60, "previous": None}
        instance.start(SimpleNamespace(params=parameters), unit, str(link))
    assert os.readlink(link) == f"generations/{IDS[1]}"
    assert os.readlink(tmp_path / "previous") == f"generations/{IDS[0]}"
    # A change to the third that failed: it is as if it had never been.
    for name, previous in ((IDS[2], None), (IDS[1], IDS[0])):
        parameters = {"generation": name, "instance": "chat.0", "timeout": 60, "previous": previous}
        instance.start(SimpleNamespace(params=parameters), unit, str(link))
    assert os.readlink(link) == f"generations/{IDS[1]}"
    assert os.readlink(tmp_path / "previous") == f"generations/{IDS[0]}"
    # And where there was none before.
    instance.start(SimpleNamespace(params={**parameters, "previous": ""}), unit, str(link))
    assert not os.path.lexists(tmp_path / "previous")
