"""scripts/fleet status: from a real Prometheus (test_dashboards.py's world), and from what servers and agents say themselves."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import metrics_world
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import agent, status
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data
from conftest import REPOSITORY
from gpu_fleet.cli import app
from test_monitoring_rules import plan
from typer.testing import CliRunner

METRICS = data.load("metrics")
RECORDED = metrics_world.VLLM.read_text()


@pytest.fixture
def url(fleet_prometheus):
    return fleet_prometheus


def fleet(*arguments):
    return CliRunner().invoke(app, ["status", *arguments])


def test_one_document_from_prometheus(url):
    done = fleet("--prometheus", url, "--json")
    told = json.loads(done.stdout)
    (service,) = told["services"]
    assert (service["name"], service["wanted"], service["right"]) == ("chat", 2, 2)
    assert service["running"] == 0 and service["kv_usage"] == 0 and service["tokens_per_second"] == 0
    assert [row["replica"] for row in told["replicas"]] == ["chat.0", "chat.1"]
    assert told["hosts"][0]["gpus"] == 1 and told["hosts"][0]["gpu_utilization"] == 0.5
    ecc = next(alert for alert in told["alerts"] if alert["alert"] == "EccErrors")
    assert ecc["severity"] == "critical" and "GPU 0 has 1 uncorrected" in ecc["summary"]
    assert done.exit_code == 1, "an alert fires"


def test_one_screen_from_prometheus(url):
    said = " ".join(fleet("--prometheus", url).stdout.split())
    assert "chat.1" in said and "2/2" in said and "critical EccErrors (firing)" in said


@contextlib.contextmanager
def watching(terminal, *arguments):
    """`fleet status --watch 1` in a process of its own; what it writes, as it comes."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 150, 0, 0))
    process = subprocess.Popen(
        # Tests in the background of a shell are deaf to Ctrl-C, and what they start inherits that.
        ["env", "--default-signal=INT", sys.executable, "-m", "gpu_fleet.cli", "status", "--watch", "1", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(REPOSITORY / "scripts")},
    )
    os.close(writer)
    said = []

    def until(so):
        end = time.monotonic() + 60
        while not so("".join(said)):
            assert time.monotonic() < end, "".join(said)
            if select.select([reader], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # a terminal whose program has ended
                    said.append(os.read(reader, 65536).decode(errors="replace"))
        return "".join(said)

    try:
        yield process, until
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def stamps(text):
    return sorted(set(re.findall(r"(\d\d:\d\d:\d\d)  from prometheus", text)))


def test_watching_is_one_screen_after_the_other_until_it_is_ended(url):
    with watching(True, "--prometheus", url) as (process, until):
        said = until(lambda text: len(stamps(text)) >= 3)
        assert said.count("\x1b[?1049h") == 1, "not on a screen of its own"
        assert "chat.1" in said and "2/2" in said and "critical EccErrors (firing)" in said
        process.send_signal(signal.SIGINT)
        said = until(lambda text: "\x1b[?1049l" in text)
        assert process.wait(20) == 0 and "Traceback" not in said


def test_watching_into_a_file_is_one_screen_below_the_other(url):
    with watching(False, "--prometheus", url) as (process, until):
        said = until(lambda text: len(stamps(text)) >= 2)
        assert "\x1b" not in said
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_watching_goes_on_while_nobody_answers():
    """What is asked is a page of the real one's answers, which comes and goes."""
    pages = {
        "/api/v1/query": json.dumps({"data": {"result": []}}),
        "/api/v1/alerts": json.dumps({"data": {"alerts": []}}),
    }
    with (
        metrics_world.serving(pages) as port,
        watching(False, "--prometheus", f"http://127.0.0.1:{port}") as (_, until),
    ):
        until(lambda text: len(stamps(text)) >= 2)
        kept, pages["/api/v1/query"] = pages["/api/v1/query"], ""
        until(lambda text: "no answer, so that this is what was known before" in text)
        pages["/api/v1/query"] = kept
        until(lambda text: "known before" not in text.rpartition("from prometheus")[2] and text.endswith("no alert\n"))


def test_watching_begins_with_an_answer():
    done = fleet("--watch", "1", "--prometheus", f"http://127.0.0.1:{metrics_world.free_port()}")
    assert done.exit_code == 2 and "refused" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["-i", "a", "--prometheus", "http://b"], ["--prometheus", "http://b", "--hosts"], ["--prometheus", "b:9090"]],
)
def test_used_wrongly(arguments):
    assert fleet(*arguments).exit_code == 2


def test_a_prometheus_that_is_not_there():
    done = fleet("--prometheus", f"http://127.0.0.1:{metrics_world.free_port()}")
    assert done.exit_code == 2 and "refused" in done.stderr


# --- from the hosts themselves ----------------------------------------------------------------------------------------------


def told(right=True, **changes):
    says = {**metrics_world.SAYS, "probe": {"right": right, "seconds": 0.2}, **changes}
    later = RECORDED.replace(
        'vllm:generation_tokens_total{engine="0",model_name="chat"} 128.0',
        'vllm:generation_tokens_total{engine="0",model_name="chat"} 328.0',
    )
    return {
        "agent chat.0": {"first": "", "second": agent.metrics(says, 0), "seconds": 2.0},
        "vllm chat.0": {"first": RECORDED, "second": later, "seconds": 2.0},
    }


def test_a_fleet_from_its_hosts():
    found = status.from_hosts(plan(), METRICS, {"gpu-01": told()}, {"gpu-01": {"gpus": 8.0}})
    (service,) = found["services"]
    assert (service["wanted"], service["right"], service["tokens_per_second"]) == (2, 1, 100.0)
    assert service["waiting"] == 0 and 0 < service["ttft_p95"] < 1 and 0 < service["itl_p95"] < 1
    one, other = found["replicas"]
    assert (one["right"], one["restarts"], other["right"], other["running"]) == (1, 1, 0, None)
    assert [row["up"] for row in found["hosts"]] == [1, 0, 0, 0] and found["hosts"][0]["gpus"] == 8
    assert found["alerts"] == [] and status.wrong(found)


def test_pages_are_those_of_the_host():
    pages = status.pages(plan(), "gpu-01")
    assert pages == {
        "agent chat.0": "http://10.0.0.1:8003/metrics",
        "vllm chat.0": "http://10.0.0.1:8000/metrics",
    }
    assert list(status.pages(plan(), "gpu-02")) == ["agent chat.0"]


def test_a_quantile_is_that_of_prometheus():
    inf = float("inf")
    assert status.quantile(0.95, {1.0: 0.0, 5.0: 20.0, inf: 20.0}) == pytest.approx(4.8)
    assert status.quantile(0.5, {1.0: 10.0, 5.0: 10.0, inf: 20.0}) == pytest.approx(1.0)
    assert status.quantile(0.95, {1.0: 10.0, inf: 20.0}) == 1.0
    assert status.quantile(0.95, {1.0: 0.0, inf: 0.0}) is None


def test_text_that_is_no_sample_is_left_out():
    text = '# HELP a b\na{x="1\\"2"} 3\nnonsense\nb 4 1700000000\nc{} NaN\nd x\n'
    found = status.samples(text)
    assert [(s.name, s.value) for s in found[:2]] == [("a", 3.0), ("b", 4.0)] and len(found) == 3
