"""Acceptance: the plan of a load, the knee, verdicts, settings, comparison, document. Servers here are formulas, called stand-ins."""

from __future__ import annotations

import copy
import json

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    answers,
    bench_compare,
    bench_document,
    bench_driver,
    bench_judge,
    bench_plan,
    bench_sample,
    capacity,
    throughput,
)
from bench_world import ASKED, KNOWN, METRICS, OBJECTIVE, PLAN, asked, job, look, made, played
from conftest import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st

RESULT = json.loads((REPOSITORY / "tests" / "unit" / "fixtures" / "bench" / "vllm-0.32.0.json").read_text())


# -- the plan ------------------------------------------------------------------------------------------------------------


def test_a_sweep_goes_two_loads_beyond_the_knee_then_full_prompts_then_repeats():
    runs = played(job(concurrencies=[1, 2, 4, 8, 16, 32, 64], rates=[2.0], budget_seconds=4000))
    first = [run["concurrency"] for run in runs if run["kind"] == "sweep" and run["repeat"] == 0]
    assert first == [1, 2, 4, 8, 16, 32], "64 would be a third load that misses"
    kinds = [run["kind"] for run in runs]
    assert kinds == ["warm", *["sweep"] * 6, "full", "open", *["sweep"] * 12]
    assert [run["concurrency"] for run in runs if run["repeat"] == 2] == first
    assert len({run["seed"] for run in runs}) == len(runs), "the same prompts again would come out of the prefix cache"
    by_load = {}
    for run in runs:
        if run["kind"] == "sweep":
            by_load.setdefault(run["concurrency"], set()).add(run["prompts"])
    assert all(len(prompts) == 1 for prompts in by_load.values()), "repeats are of the same load"


def test_full_prompts_leave_room_for_their_answer_and_fill_every_seat():
    (run,) = [run for run in played(job()) if run["kind"] == "full"]
    assert run["input_tokens"] + run["output_tokens"] == 2048
    assert run["concurrency"] == run["prompts"] == 8


def test_the_budget_ends_repeats_and_nothing_else():
    runs = played(job(budget_seconds=1))
    assert [run["kind"] for run in runs] == ["warm", "sweep", "full"]
    long, short = played(job(budget_seconds=4000)), played(job(budget_seconds=120))
    assert {run["repeat"] for run in long} == {0, 1, 2}
    assert {run["repeat"] for run in short} < {0, 1, 2} and any(run["kind"] == "full" for run in short)


def test_a_slow_server_is_asked_as_often_as_the_budget_has_room_for():
    """20 prompts of 128 tokens at 12 tokens/s are 213 s: one load would be most of the budget."""
    slow = job(
        least_prompts=20, seconds_per_point=20, output_tokens=128, budget_seconds=360, concurrencies=[1, 2, 4, 8, 16]
    )
    runs = played(slow, knee=4, tokens=12.0)
    first = [run for run in runs if run["kind"] == "sweep" and run["repeat"] == 0]
    assert [run["prompts"] for run in first] == [3, 4, 8, 16, 32], "two rounds at least"
    assert first[0]["seconds"] <= 40
    quick = [run for run in played({**slow, "budget_seconds": 4000}) if run["kind"] == "sweep"]
    assert min(run["prompts"] for run in quick) >= 20


@given(
    knee=st.integers(1, 64),
    top=st.integers(1, 128),
    repeats=st.integers(1, 4),
    tokens=st.floats(1, 1e5),
    budget=st.floats(1, 1e5),
)
@settings(max_examples=60, deadline=None)
def test_every_plan_ends_and_its_repeats_are_whole(knee, top, repeats, tokens, budget):
    load = job(concurrencies=bench_plan.concurrencies(top), repeats=repeats, budget_seconds=budget)
    runs = played(load, knee=knee, tokens=tokens)
    counts = {}
    for run in runs:
        if run["kind"] == "sweep":
            counts[run["concurrency"]] = counts.get(run["concurrency"], 0) + 1
    assert counts and len(set(counts.values())) == 1
    assert bench_plan.expected(load, runs) >= len(runs)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"input_tokens": 0}, "input_tokens"),
        ({"input_tokens": 2040}, "max-model-len of 2048"),
        ({"rates": [-1]}, "rates"),
        ({"concurrencies": []}, "concurrencies"),
        ({"budget_seconds": 0}, "budget_seconds"),
        ({"repeats": True}, "repeats"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(changed, word):
    with pytest.raises(bench_plan.BadJob, match=word):
        bench_plan.check(job(**changed))


def test_arguments_are_those_of_both_loops_and_carry_no_key():
    closed, opened = (
        bench_plan.arguments(job(), run) for run in played(job(rates=[2.5])) if run["kind"] in ("open", "full")
    )
    assert closed[closed.index("--max-concurrency") + 1] == "8" and "--request-rate" not in closed
    assert opened[opened.index("--request-rate") + 1] == "2.5" and "--max-concurrency" not in opened
    run = {**played(job())[1], "dataset": "jsonl"}
    own = bench_plan.arguments(job(), run)
    assert own[own.index("--dataset-name") + 1] == "custom_image" and own[own.index("--dataset-path") + 1].endswith(
        ".jsonl"
    )
    assert not [word for word in own if "key" in word.lower() or "bearer" in word.lower()]


def test_a_real_result_is_kept_with_units():
    kept = bench_plan.result(RESULT)
    assert kept["requests_per_second"] == pytest.approx(33.235, abs=0.001)
    assert kept["ttft_p95_ms"] == pytest.approx(30.556, abs=0.001) and kept["itl_p50_ms"] == pytest.approx(
        5.2455, abs=0.001
    )
    assert kept["prompt_tokens_per_second"] == pytest.approx(2560 / 1.2035, rel=1e-3)
    nothing = bench_plan.result({**RESULT, "completed": 0, "failed": 40})
    assert "ttft_p95_ms" not in nothing and nothing["failed_share"] == 1.0, "percentiles of nothing are zeros"
    assert bench_plan.missed(nothing, OBJECTIVE) == ["completed"]


# -- the driver ----------------------------------------------------------------------------------------------------------


def test_the_driver_runs_the_plan_and_tells_how_far_it_is(tmp_path):
    asked = []

    def serve(words):
        asked.append(list(words))
        return {**RESULT, "errors": ["", "Traceback\nOSError: gone"], "generated_texts": ["secret"]}

    runs = bench_driver.all_runs(
        str(tmp_path), job(concurrencies=[1, 2], repeats=1, full=False, budget_seconds=100), serve
    )
    told = json.loads((tmp_path / "progress.json").read_text())
    assert told["done"] and len(told["runs"]) == len(runs) == len(asked) == 3
    assert runs[1]["errors"] == {"OSError: gone": 1}
    assert "secret" not in json.dumps(told), "answers are not kept"


def test_a_server_that_answers_nothing_gets_no_load(tmp_path):
    def serve(words):
        raise ConnectionError("refused")

    (run,) = bench_driver.all_runs(str(tmp_path), job(), serve)
    assert run["problem"] == "ConnectionError: refused" and not run["result"]["completed"]
    assert json.loads((tmp_path / "progress.json").read_text())["done"]


def test_the_generators_own_time_is_of_the_requests_alone():
    seen = [(0.0, 0.0), (1.0, 10.0), (2.0, 10.1), (3.0, 10.2), (4.0, 20.0)]
    assert bench_driver.share(seen, 0.5, 3.5) == pytest.approx(0.1)
    assert bench_driver.share(seen, 2.1, 2.2) is None
    with bench_driver.Own() as own:
        before = bench_driver.time.process_time()
        sum(number * number for number in range(300_000))
        spent = bench_driver.time.process_time() - before
    begin, end = own.seen[0][0], own.seen[-1][0]
    # However busy the machine is: what was spent is in it, and little else.
    assert spent <= own.share(begin, end) * (end - begin) + 1e-6 and own.seen[-1][1] - own.seen[0][1] < spent + 1.0


# -- samples -------------------------------------------------------------------------------------------------------------


def test_a_line_of_nvidia_smi():
    assert bench_sample.gpu("1, 40536, 143771, 97, 41, 611.23") == {
        "index": 1,
        "used_mib": 40536.0,
        "total_mib": 143771.0,
        "busy": 0.97,
        "memory_busy": 0.41,
        "watts": 611.23,
    }
    assert bench_sample.gpu("0, 10, 20, [N/A], [N/A], [N/A]")["busy"] is None
    assert bench_sample.gpu("Unable to determine the device handle") is None


def test_readings_of_a_running_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho '0, 9, 100, 50, 20, 99.5\n0, 8, 100, 50, 20, 99.5'\nwhile :; do echo '0, 7, 100, 50, 20, 99.5'; sleep 0.05; done\n"
    )  # a stand-in
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = bench_sample.Gpus(50)
    seen = []
    for _ in range(200):
        seen += gpus.now()
        if seen and seen[-1]["used_mib"] == 7.0:
            break
        bench_sample.time.sleep(0.02)
    gpus.end()
    assert seen[0]["used_mib"] == 9.0 and seen[-1]["used_mib"] == 7.0, "of those that come at once the most counts"


def test_memory_is_of_the_units_own_processes(tmp_path):
    for pid, unit, own in (
        ("10", "vllm@chat.0.service", 2048),
        ("11", "vllm@chat.0.service/worker", 1024),
        ("12", "vllm@chat.01.service", 999),
    ):
        folder = tmp_path / pid
        folder.mkdir()
        (folder / "cgroup").write_text(f"3:cpu:/else\n0::/system.slice/system-vllm.slice/{unit}\n")
        (folder / "status").write_text(f"VmRSS: 5000 kB\nRssAnon: {own} kB\nRssShmem: 512 kB\nVmHWM: 4096 kB\n")
    (tmp_path / "meminfo").write_text("MemTotal: 10240 kB\nMemAvailable: 5120 kB\n")
    assert bench_sample.memory("chat.0", str(tmp_path)) == {
        "server_mib": 3.5,  # what is shared counts once
        "server_peak_mib": 8.0,
        "host_mib": 10.0,
        "available_mib": 5.0,
    }


def test_numbers_of_a_real_servers_page():
    page = (REPOSITORY / "tests" / "unit" / "fixtures" / "metrics" / "vllm-0.32.0-cpu.txt").read_text()
    names = bench_document._names(METRICS, "0.32.0")
    assert set(bench_sample.numbers(page, names)) == set(bench_document.NOTIONS)


# -- knee ----------------------------------------------------------------------------------------------------------------


def judged(load=None, **how):
    load = load or job(budget_seconds=4000)
    runs = played(load, **how)
    found = bench_judge.points(runs)
    return found, bench_judge.knee(found, load["objective"], KNOWN)


@pytest.mark.parametrize("knee", [1, 2, 4, 8, 16])
def test_the_knee_is_the_last_load_within_the_objective(knee):
    _, bend = judged(knee=knee)
    assert (bend["concurrency"], bend["seen"], bend["limited_by"]) == (knee, True, ["ttft_p95_ms"])
    assert bend["next"] == knee * 2 and "TTFT p95 1000 ms" in bend["rule"]


def test_noise_does_not_move_the_knee():
    assert {judged(knee=8, noise=0.3)[1]["concurrency"] for _ in range(3)} == {8}


def test_a_knee_that_no_load_reached_is_told():
    _, bend = judged(job(concurrencies=[1, 2, 4]), knee=8)
    assert bend["concurrency"] == 4 and not bend["seen"] and bend["next"] is None


def test_without_a_latency_the_knee_is_where_a_load_brings_no_more():
    _, bend = judged(job(objective={"failed_share": 0.0}, budget_seconds=4000), knee=4)
    assert (bend["by"], bend["concurrency"], bend["limited_by"]) == ("throughput", 4, ["output_tokens_per_second"])


def test_no_load_within_the_objective_is_no_knee():
    _, bend = judged(job(objective={**OBJECTIVE, "itl_p95_ms": 1.0}))
    assert bend["concurrency"] is None and bend["limited_by"] == ["itl_p95_ms"]
    assert bench_judge.best([], bend, KNOWN) is None


def test_what_failed_once_is_not_carried():
    runs = played(job(budget_seconds=4000))
    one = next(run for run in runs if run["kind"] == "sweep" and run["concurrency"] == 8 and run["repeat"] == 1)
    one["result"] = {**one["result"], "failed": 1, "failed_share": 0.01}
    bend = bench_judge.knee(bench_judge.points(runs), OBJECTIVE, KNOWN)
    assert (bend["concurrency"], bend["limited_by"]) == (4, ["failed_share"])


def test_the_least_load_that_brings_nearly_the_most_is_recommended():
    load = job(objective={**OBJECTIVE, "ttft_p95_ms": 1e6}, budget_seconds=4000)
    found, bend = judged(load, knee=4)
    advice = bench_judge.recommend(found, bend, 1, 100.0, KNOWN)
    assert bend["concurrency"] == 32 and advice["settings"] == {"max-num-seqs": 4}
    # 4 x 100 tokens/s are 12.5 requests/s of 32; 10 with head room, 10 replicas for 100.
    assert advice["replicas"] == 10
    assert advice["monitoring_objectives"] == {"tokens_per_second": 400.0, "running": 4}


# -- verdicts ------------------------------------------------------------------------------------------------------------


def memory(samples, gpus=(0, 1), **more):
    told = {"hosts": {"gpu-01": {"samples": samples, "gpus": list(gpus), **more}}, "utilization": 0.9}
    return bench_judge.memory(told, KNOWN)


def test_memory_is_judged_by_its_peak_on_every_gpu():
    calm = [look(t, [800.0, 700.0]) for t in range(20)]
    assert memory(calm)["outcome"] == "pass"
    peak = [*calm[:10], look(10, [800.0, 985.0]), *calm[11:]]
    assert memory(peak)["outcome"] == "fail" and "GPU 1 had 985 of 1,000 MiB" in memory(peak)["evidence"][1]
    assert memory([look(t, [930.0, 700.0]) for t in range(5)])["outcome"] == "warn"
    assert memory(calm, gpus=(0, 1, 2))["outcome"] == "unknown", "a GPU that told nothing is not below its limit"
    assert memory([calm[0], look(30, [1.0, 1.0])])["outcome"] == "unknown", "a peak in half a minute may be missed"
    assert memory([])["outcome"] == "unknown"
    assert memory(calm, restarted=True)["outcome"] == "fail"
    assert "it loaded, to its first right answer, in 42 s" in memory(calm, load_s=41.7)["evidence"][0]
    unit = {"ActiveEnterTimestampMonotonic": "95000000", "InactiveExitTimestampMonotonic": "53300000"}
    assert bench_document._load_seconds(unit) == pytest.approx(41.7) and bench_document._load_seconds({}) is None


def test_a_server_without_gpus_is_judged_by_the_hosts_memory():
    assert memory([look(t) for t in range(5)], gpus=())["outcome"] == "pass"
    assert memory([look(t, own=9800.0) for t in range(5)], gpus=())["outcome"] == "fail"


def full(preemptions=(0, 0), **changed):
    (run,) = [run for run in played(job()) if run["kind"] == "full"]
    run = {**run, **changed}
    samples = [
        look(t, server={"running": 8.0, "kv_usage": 0.5, "preemptions": float(value)})
        for t, value in zip((run["begin"], run["end"]), preemptions, strict=True)
    ]
    return bench_judge.full([run], samples, KNOWN)


def test_full_prompts_have_to_be_answered_without_being_pushed_out_again_and_again():
    assert full()["outcome"] == "pass"
    assert full(preemptions=(3, 5))["outcome"] == "warn"
    stuck = full(preemptions=(0, 80))
    assert stuck["outcome"] == "fail" and "max-num-seqs (8)" in stuck["remedy"] and "(2,048)" in stuck["remedy"]
    (run,) = [run for run in played(job()) if run["kind"] == "full"]
    lost = full(result={**run["result"], "completed": 7, "failed": 1}, errors={"ServerDisconnectedError": 1})
    assert lost["outcome"] == "fail" and "ServerDisconnectedError" in lost["evidence"]
    assert bench_judge.full([], [], KNOWN)["outcome"] == "unknown"
    assert full(preemptions=(9, 2))["outcome"] == "warn", "a counter that began anew says nothing"


@pytest.mark.parametrize(
    ("gpus", "times", "outcome"),
    [(4, 3.0, "pass"), (4, 2.9, "fail"), (2, 1.6, "pass"), (2, 1.5, "fail"), (8, 6.0, "pass"), (8, 5.9, "fail")],
)
def test_scaling_against_one_gpu(gpus, times, outcome):
    told = bench_judge.scaling(
        gpus, 100.0 * times, {"throughput": 100.0, "name": "one"}, {"0-1": "SYS", "0-2": "NV18"}, KNOWN
    )
    assert told["outcome"] == outcome
    if outcome == "fail":
        assert "link class SYS between GPUs 0-1" in told["evidence"][1] and "between the sockets" in told["evidence"][1]


def test_scaling_without_one_gpu_is_not_known():
    assert bench_judge.scaling(4, 100.0, None, {}, KNOWN)["outcome"] == "unknown"
    assert bench_judge.scaling(1, 100.0, None, {}, KNOWN)["outcome"] == "unknown"
    network = bench_judge.scaling(2, 100.0, {"throughput": 100.0, "name": "one"}, {"hosts": "network"}, KNOWN)
    assert "over the network" in network["evidence"][1]


def test_sameness_shows_each_difference():
    before = {"name": "then", "answers": [f"answer number {n}" for n in range(8)]}
    now = {"answers": list(before["answers"]), "problem": ""}
    assert bench_judge.sameness(now, before, KNOWN)["outcome"] == "pass"
    late = {**now, "answers": ["answer number 0, but longer", *before["answers"][1:]]}
    told = bench_judge.sameness(late, before, KNOWN)
    assert (
        told["outcome"] == "warn" and answers.PROMPTS[0] in told["evidence"][1] and "but longer" in told["evidence"][1]
    )
    other = bench_judge.sameness({**now, "answers": ["nonsense"] * 8}, before, KNOWN)
    assert other["outcome"] == "fail" and len(other["evidence"]) == 9
    assert bench_judge.sameness(now, None, KNOWN)["outcome"] == "unknown"
    assert bench_judge.sameness({"answers": [], "problem": "HTTP 500"}, before, KNOWN)["outcome"] == "fail"


@pytest.mark.parametrize(("cores", "outcome"), [(0.19, "pass"), (0.2, "warn"), (0.95, "fail"), (None, "unknown")])
def test_a_generator_that_is_the_limit_is_told(cores, outcome):
    assert bench_judge.generator({"concurrency": 8, "generator_cores": cores}, KNOWN)["outcome"] == outcome


# -- settings ------------------------------------------------------------------------------------------------------------

SETTINGS = {"max_num_seqs": 4, "max_model_len": 2048, "cache": {"setting": "gpu-memory-utilization", "value": "0.5"}}


def watched(runs, **server):
    return [
        look(t, server={"running": 4.0, "waiting": 0.0, "kv_usage": 0.1, "preemptions": 0.0, **server})
        for run in runs
        for t in (run["begin"], run["end"])
    ]


def test_too_few_seats_are_told_by_name():
    runs = played(job(budget_seconds=4000, max_num_seqs=4), knee=8)
    crowded = [run for run in runs if run["concurrency"] == 8 and run["kind"] == "sweep"]
    (told,) = bench_judge.too_small(runs, watched(crowded, waiting=4.0), SETTINGS, KNOWN)
    assert (told["setting"], told["value"]) == ("max-num-seqs", 4) and "4 waited" in told["evidence"]
    full_already = played(job(budget_seconds=4000, max_num_seqs=4), knee=2)
    crowded = [run for run in full_already if run["concurrency"] == 8 and run["kind"] == "sweep"]
    assert not bench_judge.too_small(full_already, watched(crowded, waiting=4.0), SETTINGS, KNOWN), (
        "more seats would bring nothing"
    )


def test_too_small_a_cache_is_told_by_name():
    runs = played(job(budget_seconds=4000), knee=8)
    sweep = [run for run in runs if run["kind"] == "sweep"]
    (told,) = bench_judge.too_small(runs, watched(sweep, kv_usage=0.99, waiting=2.0, running=3.0), SETTINGS, KNOWN)
    assert told["setting"] == "gpu-memory-utilization" and "99% of the KV cache" in told["evidence"]
    assert not bench_judge.too_small(runs, watched(sweep), SETTINGS, KNOWN)


def test_prompts_that_are_refused_name_max_model_len():
    runs = played(job())
    runs[1] = {**runs[1], "dataset": "jsonl", "errors": {"Bad Request": 3}}
    (told,) = bench_judge.too_small(runs, [], SETTINGS, KNOWN)
    assert told["setting"] == "max-model-len" and "3 requests" in told["evidence"]


@pytest.mark.parametrize(
    ("busy", "reads", "by"), [(0.95, 0.3, "compute"), (0.9, 0.8, "memory bandwidth"), (0.2, 0.1, "neither")]
)
def test_what_bounds_a_run(busy, reads, by):
    assert bench_judge.bound([look(0, [1.0], busy=busy, reads=reads)], [0], KNOWN)["by"] == by
    assert bench_judge.bound([look(0)], None, KNOWN)["by"] == "unknown"


def test_each_load_tells_how_busy_the_gpus_were():
    runs = played(job(rates=[2.0]))
    found, opened = bench_judge.points(runs), bench_judge.opened(runs)
    last = [run for run in runs if run["kind"] == "sweep" and run["concurrency"] == 8]
    samples = [look((run["begin"] + run["end"]) / 2, [1.0, 1.0], busy=0.8, reads=0.4) for run in last]
    for some in (found, opened):
        bench_judge.use(some, runs, samples, [0, 1])
    assert [point["gpu_busy"] for point in found if point["concurrency"] == 8] == [pytest.approx(0.8)]
    assert {point["gpu_memory_busy"] for point in [*found, *opened] if point.get("concurrency") != 8} == {None}


def test_the_capacity_table_reads_what_was_measured():
    about = {
        "service": "chat",
        "gpu": "H200",
        "release": "0.26.0 cu130",
        "date": "2026-11-30",
        "gpus_per_replica": 1,
        "max_model_len": 2048,
    }
    said = throughput.Said()
    told = bench_judge.measured(about, played(job(budget_seconds=4000)), 0.0)
    read = throughput.read_measured(told, said)
    assert [point.concurrency for point in read.points] == [1, 2, 4, 8, 16, 32] and not said.warnings
    answer = capacity.answer(
        {
            "traffic": {
                "requests_per_second_at_peak": 50,
                "prompt_tokens": {"mean": 64},
                "output_tokens": {"mean": 32},
            },
            "targets": {"ttft_p95_ms": 1000},
            "measured": told,
        }
    )
    assert answer["outcome"] == "answered" and answer["months"][0]["replicas"] == 2


# -- two runs ------------------------------------------------------------------------------------------------------------


def document(name="new", budget=4000, **how):
    found, bend = judged(job(budget_seconds=budget), **how)
    return {
        "name": name,
        "model": "m",
        "through": "direct",
        "settings": {"dataset": "random"},
        "points": found,
        "knee": bend,
        "versions": {"vllm": "0.32.0"},
    }


def test_slower_is_said_only_where_the_ranges_part():
    same = bench_compare.compare(document("old", noise=0.2), document(noise=0.2))
    assert not [row for row in same["rows"] if row["verdict"] in ("slower", "faster")]
    slow = bench_compare.compare(document("old", noise=0.2), document(tokens=70.0, noise=0.2))
    worse = [row for row in slow["rows"] if row["metric"] == "output_tokens_per_second"]
    assert {row["verdict"] for row in worse} == {"slower"} and "slower, most" in slow["text"]
    better = bench_compare.compare(document("old", noise=0.2), document(tokens=140.0, noise=0.2))
    assert {row["verdict"] for row in better["rows"] if row["metric"] == "requests_per_second"} == {"faster"}


@given(st.lists(st.floats(1, 100), min_size=2, max_size=5), st.lists(st.floats(1, 100), min_size=2, max_size=5))
@settings(max_examples=100, deadline=None)
def test_ranges_that_touch_are_never_slower(one, other):
    old, new = (
        {
            "median": {"ttft_p95_ms": sorted(v)[len(v) // 2]},
            "low": {"ttft_p95_ms": min(v)},
            "high": {"ttft_p95_ms": max(v)},
            "repeats": len(v),
        }
        for v in (one, other)
    )
    told = bench_compare.judge(old, new, "ttft_p95_ms", False)["verdict"]
    assert (told == "slower") == (min(other) > max(one)) and (told == "faster") == (max(other) < min(one))


def test_without_repeats_nothing_is_said():
    once = bench_compare.compare(document("old", budget=1), document(budget=1, tokens=10.0))
    assert {row["verdict"] for row in once["rows"]} == {"unknown"} and "needs" in once["text"]
    assert "how much is noise is not known" in once["noise"]["new"]["text"]


def test_other_loads_are_shown_and_not_judged():
    new = {
        **document(tokens=10.0),
        "settings": {"dataset": "random", "input_tokens": 999},
        "versions": {"vllm": "0.33.0"},
    }
    told = bench_compare.compare(document("old"), new)
    assert {row["verdict"] for row in told["rows"]} == {"unknown"} and "input_tokens was None and is 999" in told[
        "text"
    ]
    assert told["changed"] == ["vllm: 0.32.0 -> 0.33.0"]


# -- the document --------------------------------------------------------------------------------------------------------


def test_a_job_comes_from_the_plan():
    load = asked()
    assert load["concurrencies"] == [1, 2, 4, 8, 16] and load["max_num_seqs"] == 8 and load["full"]
    assert (load["base_url"], load["model"], load["tokenizer"]) == (
        "http://10.0.0.1:8000",
        "chat",
        "/var/lib/vllm/models/smol",
    )
    assert load["objective"]["ttft_p95_ms"] == 2000 and "default" in load["objective"]["from"]
    own = asked({"chat": {"ttft_seconds": 1.5}})["objective"]
    assert own == {"failed_share": 0.0, "ttft_p95_ms": 1500.0, "from": "monitoring_objectives"}
    assert asked({"chat": {"ttft_seconds": 1}}, objective={"itl_p95_ms": 50})["objective"]["from"] == "accept_objective"


def test_another_way_needs_a_key_of_its_own():
    with pytest.raises(bench_document.BadSetting, match="accept_url needs accept_key"):
        asked(url="https://10.0.0.5")
    load = asked(url="https://10.0.0.5/", has_key="True")
    assert (load["base_url"], load["through"], load["metrics_url"]) == (
        "https://10.0.0.5",
        "https://10.0.0.5/",
        "http://10.0.0.1:8000/metrics",
    )


def test_settings_come_as_texts_from_templates():
    texts = {name: str(value) for name, value in ASKED.items()} | {"full": "False", "budget": "360.0"}
    load = asked(**texts)
    assert load["input_tokens"] == 64 and load["budget_seconds"] == 360.0 and not load["full"]
    with pytest.raises(bench_document.BadSetting, match=r"accept_repeats is '2\.5'; give a whole number"):
        asked(repeats="2.5")
    with pytest.raises(bench_document.BadSetting, match="accept_budget is 'long'"):
        asked(budget="long")


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"service": "chatt"}, "Did you mean chat"),
        ({"replica": "chat.7"}, "chat.0"),
        ({"objective": {"ttft_ms": 1}}, "ttft_p95_ms"),
        ({"objective": {"ttft_p95_ms": "1"}}, "give a number"),
    ],
)
def test_what_is_asked_wrongly_is_refused_by_name(changed, word):
    with pytest.raises(bench_document.BadSetting, match=word):
        asked(**changed)


def test_a_users_prompts_become_text_parts():
    told = [
        json.loads(line)
        for line in bench_document.prompts('{"prompt": "Wer?", "id": 1}\n\n{"prompt": "a\\nb"}\n').splitlines()
    ]
    assert told == [{"content": [{"type": "text", "text": "Wer?"}]}, {"content": [{"type": "text", "text": "a\nb"}]}]
    for text, word in (("{", "line 1 is no JSON"), ('{"text": "x"}', "line 1 has no text"), ("\n", "no line")):
        with pytest.raises(bench_document.BadSetting, match=word):
            bench_document.prompts(text)
    assert asked(prompts_text='{"prompt": "x"}')["dataset"] == "jsonl"


def outcomes(told):
    return {one["name"]: one["outcome"] for one in told["verdicts"]}


def test_a_document_says_everything_and_is_json():
    told = made(rate=100.0)
    assert outcomes(told) == {
        "memory": "pass",
        "full prompts": "pass",
        "scaling": "unknown",
        "sameness": "unknown",
        "settings": "pass",
        "generator": "pass",
    }
    assert told["outcome"] == "pass" and told["knee"]["concurrency"] == 8
    assert told["recommendation"]["settings"] == {"max-num-seqs": 8} and told["recommendation"]["replicas"] == 5
    throughput.read_measured(told["measured"], throughput.Said())
    assert json.loads(json.dumps(told)) == told
    assert len(told["samples"]["gpu-01"]) <= bench_document.KEPT_LOOKS
    assert any("knee: concurrency 8" in line for line in bench_document.lines(told))


def test_the_next_run_is_compared_with_the_last():
    first = made(noise=0.2)
    second = made("2026-11-30T11:00:00", kept=[first], tokens=60.0, noise=0.2)
    assert outcomes(second)["sameness"] == "pass" and second["differences"]["old"] == first["name"]
    assert "slower" in second["differences"]["text"]
    other = made("2026-11-30T12:00:00", kept=[first, second], texts=["else"] * 8)
    assert other["outcome"] == "fail" and outcomes(other)["sameness"] == "fail"
    after = made("2026-11-30T13:00:00", kept=[first, second, other], texts=["else"] * 8)
    assert outcomes(after)["sameness"] == "fail", "what was not accepted is nothing to compare with"


def test_a_run_of_another_load_in_between_is_passed_over():
    first = made(noise=0.2)
    other = made("2026-11-30T11:00:00", kept=[first], noise=0.2)
    other["through"] = "https://10.0.0.5"
    third = made("2026-11-30T12:00:00", kept=[first, other], noise=0.2)
    assert third["differences"]["old"] == first["name"] and not third["differences"]["other_load"]
    assert made("2026-11-30T12:00:00", kept=[other])["differences"]["other_load"]


def test_scaling_finds_the_run_with_one_gpu():
    def on(gpus):
        plan = copy.deepcopy(PLAN)
        plan["replicas"]["chat.0"]["gpus"] = list(range(gpus))
        return plan

    one = made(plan=on(1))
    assert one["scaling"]["gpus"] == 1
    four = made("2026-11-30T11:00:00", kept=[one], plan=on(4), tokens=250.0)
    (told,) = [verdict for verdict in four["verdicts"] if verdict["name"] == "scaling"]
    assert told["outcome"] == "fail" and "2.50 times, at least 3 wanted" in told["evidence"][0]
    another = made("2026-11-30T12:00:00", kept=[four, one], plan=on(4))
    assert another["differences"]["old"] == four["name"], "compared with as many GPUs, whatever came in between"


def test_what_no_service_is_accepted_without():
    def all_of(**changed):
        names = {"memory": "pass", "full_prompts": "pass", "scaling": "unknown", "sameness": "unknown"} | changed
        return bench_judge.outcome(
            [bench_judge.verdict(name.replace("_", " "), word, []) for name, word in names.items()]
        )

    assert all_of() == "pass"
    assert all_of(memory="unknown") == "unknown" and all_of(full_prompts="unknown") == "unknown"
    assert all_of(sameness="warn") == "warn" and all_of(scaling="fail", memory="unknown") == "fail"


def test_settings_are_a_verdict():
    small = [{"setting": "max-num-seqs", "value": 4, "evidence": "4 waited", "remedy": "raise max-num-seqs above 4"}]
    runs, told_of = played(job()), [look(0, server={"running": 1.0})]
    told = bench_judge.settings(small, runs, told_of)
    assert told["outcome"] == "warn" and told["evidence"] == ["max-num-seqs 4 is too small: 4 waited"]
    assert bench_judge.settings([], runs, told_of)["outcome"] == "pass"
    assert bench_judge.settings([], runs, [look(0)])["outcome"] == "unknown"
    assert bench_judge.settings([], runs[:1], told_of)["outcome"] == "unknown", "no load was answered"


def test_a_generator_that_ended_early_is_no_acceptance():
    raw = {
        "name": "n",
        "started": "n",
        "collection": "0",
        "progress": {"runs": [], "problem": "killed"},
        "answers": {"answers": [], "problem": ""},
        "hosts": {},
    }
    told = bench_document.document(asked(), PLAN, raw, [], KNOWN)
    assert told["outcome"] == "fail" and told["verdicts"][0]["evidence"] == ["killed"] and told["measured"] is None
    assert bench_document.lines(told)


def test_thinned_samples_keep_the_peak():
    samples = [look(t, own=100.0 + (1000.0 if t == 1234 else 0.0)) for t in range(5000)]
    kept = bench_document.thinned(samples)
    assert len(kept) <= bench_document.KEPT_LOOKS and max(bench_document.used(sample) for sample in kept) == 1100.0
