"""The same questions before and after a change."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import answers, probe


def came(texts, rate=100.0, seconds=2.0, problem=""):
    return {"answers": texts, "tokens_per_second": rate, "seconds": seconds, "problem": problem}


FORMER = [f" the answer to question {number}" for number in range(8)]


def test_equal_answers_are_right():
    assert answers.faults(came(FORMER), came(FORMER), 0.5, 0.5) == []


def test_a_word_that_differs_later_is_no_fault():
    later = [text + " and more" for text in FORMER]
    assert answers.faults(came(FORMER), came(later), 1.0, 0.5) == []


def test_nonsense_is_told_with_both_answers():
    (said,) = answers.faults(came(FORMER), came(["!!!!"] * 8), 0.5, 0.5)
    assert "0 of 8 answers begin as before, wanted 50%" in said
    assert "it was ' the answer to question 0' and is '!!!!'" in said


@pytest.mark.parametrize("equal, fault", [(4, False), (3, True)])
def test_the_share_is_what_is_asked_for(equal, fault):
    after = FORMER[:equal] + ["?"] * (8 - equal)
    assert bool(answers.faults(came(FORMER), came(after), 0.5, 0.5)) is fault


@pytest.mark.parametrize(
    "rate, seconds, fault",
    [(51, 3.9, False), (49, 4.1, True), (49, 2.9, False)],
    ids=["fast enough", "slow", "slow by less than a second"],
)
def test_a_slow_one_is_told(rate, seconds, fault):
    said = answers.faults(came(FORMER), came(FORMER, rate, seconds), 0.5, 0.5)
    assert bool(said) is fault
    assert all("tokens/s, it was 100, wanted 50% of that" in line for line in said)


def test_one_that_does_not_answer_is_told():
    assert answers.faults(came(FORMER), came([], 0, 0, "HTTP 500"), 0.5, 0.5) == ["it does not answer: HTTP 500"]


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        answer = {"choices": [{"text": body["prompt"].upper()}], "usage": {"completion_tokens": 24}}
        if self.server.broken:
            del answer["usage"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    made.asked, made.broken = [], False
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def test_every_prompt_is_asked_once_after_one_that_warms_up(server):
    said = answers.ask(f"http://127.0.0.1:{server.server_port}", "key", "chat", 5)
    assert said["answers"] == [prompt.upper() for prompt in answers.PROMPTS]
    assert said["tokens"] == 8 * 24
    assert said["tokens_per_second"] == pytest.approx(said["tokens"] / said["seconds"], rel=0.2)
    assert len(server.asked) == 1 + len(answers.PROMPTS)
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in server.asked} == {("chat", 0, 24)}


def test_an_answer_of_another_shape_is_a_problem(server):
    server.broken = True
    assert "usage" in answers.ask(f"http://127.0.0.1:{server.server_port}", "key", "chat", 5)["problem"]


def test_the_first_problem_ends_it():
    said = answers.measured(lambda prompt: probe.Answer(404, 0.1, f"HTTP 404 for {prompt}"))
    assert said == {
        "answers": [],
        "tokens": 0,
        "seconds": 0.0,
        "tokens_per_second": 0.0,
        "problem": f"HTTP 404 for {answers.PROMPTS[0]}",
    }
