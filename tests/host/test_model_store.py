"""Models on the hosts, after hands were at one of them."""

from __future__ import annotations

import pytest

STORE = "/var/lib/vllm/models"
MODELS = ["from-folder", "from-hub"]
FILES = ["config.json", "deep/vocabulary.txt", "model.safetensors", "modeling_own.py"]


@pytest.mark.parametrize("model", MODELS)
def test_exactly_the_models_files_are_there(host, model):
    """Neither the pickle nor hidden files; what hands added is gone, what they removed is back."""
    found = host.check_output(f"cd {STORE}/{model} && find . -type f -printf '%P\\n' | sort").splitlines()
    assert found == FILES


@pytest.mark.parametrize("model", MODELS)
def test_content_is_the_sources(host, model):
    """The weights of both sources are made from one seed, first the folder's, then the hub's."""
    wanted = {"from-folder": 0, "from-hub": 1}[model]
    code = (
        "import random, hashlib; numbers = random.Random(5)\n"
        f"content = [numbers.randbytes(12 << 20) for _ in range(2)][{wanted}]\n"
        "print(hashlib.sha256(content).hexdigest())"
    )
    assert host.file(f"{STORE}/{model}/model.safetensors").sha256sum == host.check_output("python3 -c %s", code)


@pytest.mark.parametrize("model", MODELS)
def test_any_service_user_can_read_and_none_can_write(host, model):
    said = host.check_output(f"find {STORE}/{model} -printf '%y %m %u:%g\\n' | sort -u").splitlines()
    assert said == ["d 755 root:root", "f 644 root:root"]
    host.run_expect(
        [0], f"setpriv --reuid=nobody --regid=nogroup --clear-groups cat {STORE}/{model}/model.safetensors > /dev/null"
    )


def test_only_what_was_altered_was_replaced(host, host_name):
    if host_name == "gpu-01":
        assert (
            str(host.check_output(f"stat --format=%i {STORE}/from-folder/config.json"))
            == host.file("/var/tmp/untouched").content_string
        )


def test_nothing_is_left_of_deliveries_or_refusals(host, host_name):
    there = set(host.check_output(f"ls --almost-all {STORE}").split())
    mine = {"somebody-elses"} if host_name == "gpu-01" else set()
    assert there == {*MODELS, *(f".{name}.record.json" for name in MODELS), *mine}
    assert host.check_output("find /var/lib/small -type f") == ""


def test_what_is_somebody_elses_was_not_touched(host, host_name):
    if host_name == "gpu-01":
        assert host.file(f"{STORE}/somebody-elses").mode == 0o700


def test_one_host_was_served_by_a_user_with_sudo(host, host_name):
    said = host.check_output("journalctl --quiet --no-pager --output=cat --identifier=sudo")
    assert ("operator" in said) is (host_name == "gpu-01")
