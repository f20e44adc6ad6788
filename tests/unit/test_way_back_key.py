"""Which key an instance has while it changes and when it goes back; the units themselves are stand-ins."""

import os
from types import SimpleNamespace

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.modules import instance

OLD, NEW = "VLLM_API_KEY=old\n", "VLLM_API_KEY=new\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An instance that serves generation `one` with the old key; start() has systemd begin what it is asked."""
    unit = SimpleNamespace(
        name="vllm@chat.0", active="inactive", sub="dead", pid=0, invocation="before", generation="one"
    )
    monkeypatch.setattr(instance, "AGENT", str(tmp_path / "agent"))
    monkeypatch.setattr(instance, "call", lambda *_: None)
    monkeypatch.setattr(instance.units, "show", lambda _: SimpleNamespace(invocation="begun"))
    home = tmp_path / "chat.0"
    home.mkdir()
    instance.point(str(home / "current"), "generations/one")
    (home / "secrets.env").write_text(OLD)
    (home / "secrets.env").chmod(0o600)

    def start(generation, previous=None):
        module = SimpleNamespace(
            params={"instance": "chat.0", "generation": generation, "previous": previous, "timeout": 60}
        )
        assert instance.start(module, unit, str(home / "current")) == "begun"

    home_of = SimpleNamespace(path=home, start=start)
    home_of.waits = (home / "secrets.env.next").write_text
    home_of.has = lambda name="secrets.env": (home / name).read_text() if (home / name).exists() else None
    return home_of


def test_a_start_takes_the_key_that_waits(home):
    home.waits(NEW)
    home.start("two")
    assert (home.has(), home.has("secrets.env.next")) == (NEW, None)


def test_what_goes_back_has_its_own_key_again_and_the_new_one_waits_for_the_next_try(home):
    home.waits(NEW)
    home.start("two")
    home.start("one", previous="")
    assert (home.has(), home.has("secrets.env.next")) == (OLD, NEW)
    assert os.stat(home.path / "secrets.env").st_mode & 0o777 == 0o600
    home.start("two")
    assert (home.has(), home.has("secrets.env.next")) == (NEW, None)


def test_a_change_without_a_key_goes_back_with_the_key_that_it_has(home):
    """Also where an earlier change had a new key: what was before that is not before this one."""
    home.waits(NEW)
    home.start("two")
    home.start("three")
    home.start("two", previous="one")
    assert (home.has(), home.has("secrets.env.next")) == (NEW, None)


def test_a_rank_that_the_change_did_not_come_to_keeps_its_key(home):
    """It went wrong on another host before: here the link was never switched, and what is kept is of an earlier change."""
    home.waits(NEW)
    home.start("two")
    home.start("two", previous="one")
    assert (home.has(), home.has("secrets.env.next")) == (NEW, None)
    home.waits(OLD)
    home.start("two", previous="one")
    assert (home.has(), home.has("secrets.env.next")) == (NEW, OLD)
