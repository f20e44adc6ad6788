"""What goes from a host, what stays, and that data/made.yml knows all that the roles make."""

import re
import subprocess

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import teardown
from conftest import REPOSITORY

MADE = yaml.safe_load((REPOSITORY / "data" / "made.yml").read_text())
PLAN = {
    "hosts": {
        "gpu-01": {
            "instances": [
                {"instance": "chat.0", "config": {"model": "/m/small"}},
                {"instance": "wide.0", "config": {"model": "/m/wide"}},
            ],
            "ray": [],
        },
        "gpu-02": {"instances": [{"instance": "wide.0", "config": {"model": "/m/wide"}}], "ray": []},
    },
    "replicas": {
        "chat.0": {"hosts": ["gpu-01"], "ray_hosts": []},
        "wide.0": {"hosts": ["gpu-01", "gpu-02"], "ray_hosts": []},
    },
}
GROUPS = {"gpu_hosts": ["gpu-01", "gpu-02"], "gateways": ["gw"]}


def test_names_of_instances():
    assert teardown.instances(["chat.0", "a-b.12", "chat.0", "chat", ".0", "chat.x", "chat.0.new"]) == [
        "a-b.12",
        "chat.0",
    ]
    assert teardown.servers(["chat.0"], "gpu-01") == ["chat/chat.0", "chat/chat.0-gpu-01"]


def test_what_the_inventory_names_stays_and_what_is_left_over_goes():
    found = ["chat.0", "chat.1", "old.0"]
    assert teardown.going(found, PLAN, "gpu-01", ["chat"], False) == ["chat.1"]
    assert teardown.going(found, PLAN, "gpu-01", ["chat"], True) == ["chat.0", "chat.1"]
    assert teardown.going(found, PLAN, "gpu-01", [], False) == ["chat.1", "old.0"]
    # Moved to gpu-01: what gpu-02 had of it is left over.
    assert teardown.going(["chat.0"], PLAN, "gpu-02", ["chat"], False) == ["chat.0"]


def refused(seen, services=(), named=False):
    return teardown.refused(seen, PLAN, GROUPS, services, named)


def test_what_is_in_service_is_refused_unless_it_is_meant():
    assert refused({"gpu-01": ["chat.0", "old.0"]}, ["old"]) == []
    assert refused({"gpu-01": ["chat.0", "chat.1"]}, ["chat"]) == [], "chat.1 is left over, chat.0 stays"
    (said,) = refused({"gpu-01": ["chat.0"], "gpu-02": []}, ["chat"])
    assert "the inventory names chat.0 on gpu-01" in said
    assert refused({"gpu-01": ["chat.0"]}, ["chat"], named=True) == []
    assert refused({"gpu-01": [], "gpu-02": []}, ["none"]) == []


def test_a_host_of_the_fleet_is_refused_unless_it_is_meant():
    (said,) = refused({"gpu-01": []})
    assert said.startswith("gpu-01 is in gpu_hosts")
    assert "gateways" in refused({"gw": []})[0]
    assert refused({"spare": ["old.0"]}) == []


def test_no_part_of_a_replica_is_left_alone():
    both = {"gpu-01": ["wide.0"], "gpu-02": ["wide.0"]}
    (said,) = refused({"gpu-01": ["wide.0"]}, ["wide"], named=True)
    assert "wide.0 runs on gpu-02, too" in said
    assert refused(both, ["wide"], named=True) == []
    assert refused({"gpu-01": ["wide.0"], "gpu-02": []}, ["wide"], named=True) == []


def test_weights_go_where_nobody_else_on_the_host_uses_them():
    models = {
        "chat.0": "/m/small",
        "old.0": "/m/old",
        "older.0": "/m/small",
        "else.0": "/elsewhere/x",
        "up.0": "/m/../etc",
    }
    assert teardown.weights(models, ["old.0", "older.0", "else.0", "up.0"], PLAN, "gpu-01", "/m/") == ["old"]
    assert teardown.weights(models, ["chat.0", "older.0"], PLAN, "gpu-01", "/m") == ["small"]


def test_a_block_goes_and_what_others_wrote_stays():
    text = "A=1\n# BEGIN gpu_fleet\nB=2\n# END gpu_fleet\nC=3\n"
    assert teardown.without_block(text, "# BEGIN gpu_fleet", "# END gpu_fleet") == "A=1\nC=3\n"
    for other in ("A=1\n", "# BEGIN gpu_fleet\nB=2\n", "# END gpu_fleet\n# BEGIN gpu_fleet\n"):
        assert teardown.without_block(other, "# BEGIN gpu_fleet", "# END gpu_fleet") == other


def test_places_follow_the_variables_of_the_roles():
    assert teardown.of_instance(MADE, "units", "chat.0")[0] == "vllm-agent@chat.0.service"
    paths = teardown.of_host(MADE, "paths", {"releases": "/srv/r", "firewall": "/etc/x.nft", "packages": ""})
    assert {"/srv/r", "/etc/x.nft", ""} <= set(paths)


# Folders in which roles write files of their own, by name in their tasks, variables and modules.
PLACES = re.compile(
    r"(?:/etc/systemd/system|/etc/security/limits\.d|/etc/sysctl\.d|/etc/apt/(?:sources\.list|apt\.conf)\.d|/etc/gpu[_-]fleet"
    r"|/usr/local/lib|/opt/vllm|/var/lib/gpu[_-]fleet|/etc/prometheus)/[A-Za-z0-9_@./-]*[A-Za-z0-9]"
)


@pytest.mark.parametrize("role", sorted(path.name for path in (REPOSITORY / "roles").iterdir()))
def test_every_file_that_a_role_makes_is_known(role):
    texts = [
        path.read_text()
        for part in ("tasks", "vars", "defaults")
        for path in (REPOSITORY / "roles" / role / part).glob("*.yml")
    ]
    if role == "package_source":
        texts.append((REPOSITORY / "data" / "package_source.yml").read_text())
    named = {path for text in texts for path in PLACES.findall(text) if "example" not in path}
    known = [*MADE["host"]["paths"], *MADE["host"]["empty"], *MADE["instance"]["paths"], *MADE["instance"]["empty"]]
    known += [
        "/opt/vllm/releases",
        "/etc/gpu_fleet/firewall.nft",
        "/var/lib/gpu_fleet/packages",
    ]  # {releases}, {firewall}, {packages}
    # What role gpu_driver notes of a change of the driver, which stays.
    known += ["/var/lib/gpu_fleet/driver-change.json", "/var/lib/gpu_fleet/driver-unproved"]
    unknown = [path for path in named if not any(path == one or path.startswith(f"{one}/") for one in known)]
    # What stands before the name of an instance.
    unknown = [path for path in unknown if path not in ("/etc/systemd/system/ray", "/etc/systemd/system/vllm")]
    assert unknown == []


# The module on a host, its folders below a temporary one.


class Module:
    """What the module asks of Ansible."""

    def __init__(self, check=False):
        self.check_mode = check

    def fail_json(self, **told):
        raise AssertionError(told["msg"])


@pytest.fixture
def host_of(monkeypatch):
    from ansible_collections.gpu_fleet.vllm.plugins.modules import teardown as module

    asked = []

    def systemctl(*arguments):
        asked.append(arguments)
        told = (
            "ActiveState=active\nUnitFileState=enabled\n"
            if arguments[-1].startswith("runs")
            else "ActiveState=inactive\n"
        )
        return subprocess.CompletedProcess(arguments, 0, told, "")

    monkeypatch.setattr(module.units, "systemctl", systemctl)

    def make(check=False):
        host = module.Host(Module(check))
        host.asked = asked
        return host

    return make


def grown(tmp_path):
    """An instance's folder with a link out of it, a folder of somebody else's, a file with a block of ours."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").write_text("kept")
    (tmp_path / "made/sub").mkdir(parents=True)
    (tmp_path / "made/sub/key").write_text("secret")
    (tmp_path / "made/link").symlink_to(tmp_path / "outside")
    (tmp_path / "linked").symlink_to(tmp_path / "outside")
    (tmp_path / "apt").mkdir()
    (tmp_path / "apt/own.list.aside").write_text("deb x")
    (tmp_path / "conf").write_text("A=1\n# BEGIN x\nB=2\n# END x\n")
    (tmp_path / "only").write_text("# BEGIN x\nB=2\n# END x\n")


def take(host, tmp_path):
    for name in ("made", "linked", "missing"):
        host.remove(str(tmp_path / name))
    host.remove_block(str(tmp_path / "conf"), "# BEGIN x", "# END x")
    host.remove_block(str(tmp_path / "only"), "# BEGIN x", "# END x")
    host.put_back([str(tmp_path / "apt"), str(tmp_path / "none")], ".aside")


def test_check_mode_names_what_goes_and_touches_nothing(tmp_path, host_of):
    grown(tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    looked, done = host_of(check=True), host_of()
    take(looked, tmp_path)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    take(done, tmp_path)
    assert looked.gone == done.gone


def test_a_link_goes_and_what_it_points_at_stays(tmp_path, host_of):
    grown(tmp_path)
    host = host_of()
    take(host, tmp_path)
    assert (tmp_path / "outside/kept").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["apt", "conf", "outside"]
    assert (tmp_path / "conf").read_text() == "A=1\n"
    assert [path.name for path in (tmp_path / "apt").iterdir()] == ["own.list"]
    again = host_of()
    take(again, tmp_path)
    assert again.gone == []


def test_a_folder_with_what_others_put_there_stays_and_is_named(tmp_path, host_of):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/theirs").write_text("")
    (tmp_path / "empty").mkdir()
    host = host_of()
    for name in ("full", "empty", "missing"):
        host.remove_empty(str(tmp_path / name))
    assert host.kept == [f"{tmp_path}/full, with theirs"]
    assert host.gone == [f"{tmp_path}/empty"]


def test_what_runs_or_is_enabled_is_stopped_and_nothing_else(host_of):
    host = host_of()
    host.stop("runs.service")
    host.stop("gone.service")
    assert host.gone == ["runs.service"]
    assert ("disable", "--now", "runs.service") in host.asked
    assert not any("gone.service" in call and "disable" in call for call in host.asked)


@pytest.mark.parametrize("path", ["/", "/etc", "/etc/", "/var/.."])
def test_no_place_of_everybody_is_ever_taken_away(path, host_of):
    """In check mode, so that a fault shows and does no harm."""
    with pytest.raises(AssertionError, match="is no place of the collection's own"):
        host_of(check=True).remove(path)
