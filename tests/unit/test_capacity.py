"""Capacity and costs: by hand, by property, with results of vllm bench serve, and what is refused."""

from __future__ import annotations

import copy
import json
import math

import pytest
import typer
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import capacity, throughput
from conftest import REPOSITORY
from gpu_fleet import api
from gpu_fleet.cli_capacity import register
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

FIXTURES = REPOSITORY / "tests" / "unit" / "fixtures" / "bench"
EXAMPLE = REPOSITORY / "docs" / "examples" / "capacity.yml"
COSTS = {
    "currency": "EUR",
    "average_to_peak": 1,
    "api": {"price_per_million_input_tokens": 1, "price_per_million_output_tokens": 2},
    "host": {"price_per_hour": 2},
}


def point(concurrency, rate, ttft=100.0, itl=10.0, **more):
    return {
        "concurrency": concurrency,
        "requests_per_second": rate,
        "prompt_tokens_per_second": rate * 1000,
        "output_tokens_per_second": rate * 200,
        "ttft_p95_ms": ttft,
        "itl_p95_ms": itl,
        **more,
    }


def document(rate=10.0, points=None, prompt=1000, output=200, **more):
    """1000 tokens in, 200 out, measured with the same; one GPU a replica."""
    return {
        "traffic": {
            "requests_per_second_at_peak": rate,
            "prompt_tokens": {"mean": prompt},
            "output_tokens": {"mean": output},
            **more.pop("traffic", {}),
        },
        "measured": {
            "gpu": "GPU",
            "release": "1",
            "date": "today",
            "gpus_per_replica": 1,
            "prompt_tokens": {"mean": 1000},
            "output_tokens": {"mean": 200},
            "points": points or [point(1, 1), point(8, 4, 200, 20), point(16, 5, 400, 40)],
            **more.pop("measured", {}),
        },
        **more,
    }


def now(*arguments, **more):
    return capacity.answer(document(*arguments, **more))["months"][0]


def test_the_example_by_hand():
    told = capacity.answer(yaml.safe_load(EXAMPLE.read_text()))
    # TTFT of 800 ms lies halfway between 400 ms at 32 and 1200 ms at 64: 9 requests/s; a fifth stays free: 7.2.
    assert told["replica"]["requests_per_second"] == pytest.approx(9)
    assert told["replica"]["requests_per_second_with_head_room"] == pytest.approx(7.2)
    assert told["replica"]["interpolated_between_concurrencies"] == [32, 64]
    # 20 / 7.2 = 2.8: 3 replicas, 3 more on a second host; 35.4 / 7.2 = 4.9: 5, and 4 more for a host of 4.
    rows = told["months"]
    assert [row["month"] for row in rows] == list(range(7))
    assert [row["replicas"] for row in rows] == [6, 8, 8, 8, 9, 9, 9]
    assert [row["hosts"] for row in rows] == [2, 2, 2, 2, 3, 3, 3]
    assert {row["binding"] for row in rows} == {"latency (TTFT p95)"}
    # A request costs (1000 x 0.3 + 200 x 0.9) / 1e6 = 0.00048; 20 x 0.4 a second for 730 x 3600 s.
    assert rows[0]["api_per_month"] == pytest.approx(0.00048 * 8 * 2_628_000, abs=0.01)
    # 6 an hour x 730 x (1 + 0.1 + 0.15), two hosts.
    assert rows[0]["fleet_per_month"] == pytest.approx(6 * 730 * 1.25 * 2)
    assert told["costs"]["break_even_requests_per_second"] == pytest.approx(10950 / (0.00048 * 0.4 * 2_628_000))
    assert told["costs"]["break_even_month"] == 1
    assert rows[0]["cheaper"] == "api"
    assert rows[1]["cheaper"] == "fleet"


@pytest.mark.parametrize(
    ("more", "replicas", "binding"),
    [
        ({}, 2, "prefill and decode throughput"),  # the last point: 5 requests/s
        ({"prompt": 1200}, 3, "prefill throughput"),  # 10 x 1200 / 5000 = 2.4
        ({"output": 250}, 3, "decode throughput"),  # 10 x 250 / 1000 = 2.5
        ({"prompt": 500, "output": 100}, 2, "request rate"),  # never more requests than were measured
        ({"targets": {"ttft_p95_ms": 200}}, 3, "latency (TTFT p95)"),  # the point at 8: 4 requests/s
        ({"targets": {"itl_p95_ms": 15}}, 4, "latency (ITL p95)"),  # halfway from 1 to 4 requests/s: 2.5
        ({"targets": {"ttft_p95_ms": 300, "itl_p95_ms": 25}}, 3, "latency (TTFT p95 and ITL p95)"),  # 4.25
        ({"targets": {"head_room_share": 0.5}}, 4, "prefill and decode throughput"),
        ({"targets": {"redundancy": "replica"}}, 3, "prefill and decode throughput"),
        ({"rate": 1.0, "targets": {"redundancy": "replica"}}, 2, "redundancy"),
        ({"rate": 1.0}, 1, "smallest fleet"),
    ],
)
def test_what_decides(more, replicas, binding):
    row = now(**{"rate": 10.0, **more})
    assert (row["replicas"], row["binding"]) == (replicas, binding)


def test_cached_prompts_cost_no_prefill():
    # Both lengths are as measured: decode and requests still bind at 5 a second, prefill only at 10.
    row = now(traffic={"cached_share_of_prompt": 0.5})
    assert row["binding"] == "decode throughput"
    assert row["replicas_by"]["prefill throughput"] == pytest.approx(1)
    # What was measured with a warm cache does not hold for a cold one: 5000 x 0.5 / 1000 = 2.5 requests/s.
    assert now(measured={"cached_share_of_prompt": 0.5})["replicas"] == 4


def test_a_lost_host_leaves_what_the_traffic_needs():
    for fit in range(1, 9):
        for needed in range(1, 40):
            fleet = capacity.Fleet(1.0, 2, 2 * fit, "host")
            hosts, total = fleet.hosts(needed), needed + fleet.spare(needed)
            lost = -(-total // hosts) if needed <= fit else fit
            assert lost <= fit
            assert total - lost >= needed
            assert hosts >= 2
    over_hosts = capacity.Fleet(1.0, 16, 8, "host")
    assert (over_hosts.spare(3), over_hosts.hosts(3)) == (1, 8)


def test_nothing_is_counted_beyond_the_last_point():
    told = capacity.answer(document(1000.0, targets={"ttft_p95_ms": 10_000}))
    assert told["replica"]["requests_per_second"] == 5
    assert told["months"][0]["replicas"] == 200
    assert any("beyond it is not known" in warning["message"] for warning in told["warnings"])


def test_errors_of_a_point_are_a_limit():
    points = [point(1, 1), point(8, 4), point(16, 8, failed_share=0.1)]
    assert now(8.0, points)["replicas"] == 2
    assert now(8.0, points)["binding"] == "failed requests"
    assert now(8.0, points, targets={"failed_share": 0.1})["replicas"] == 1


def test_repeats_count_as_their_median():
    points = [point(8, rate) for rate in (4, 5, 40)]
    assert capacity.answer(document(10, points))["replica"]["requests_per_second"] == 5


def test_targets_that_no_point_keeps():
    told = capacity.answer(document(targets={"ttft_p95_ms": 50}))
    assert (told["outcome"], told["months"]) == ("cannot_be_met", [])
    assert "50 ms is met at no measured point; the least is 100 ms, at concurrency 1" in told["reasons"][0]
    points = [point(1, 1, 100, 50), point(8, 4, 500, 10)]
    assert (
        "none together"
        in capacity.answer(document(1, points, targets={"ttft_p95_ms": 200, "itl_p95_ms": 20}))["reasons"][0]
    )


def test_other_lengths_than_measured_are_told_with_the_numbers():
    told = capacity.answer(document(prompt=1500))
    assert any("1500 tokens, measured with 1000 (1.50 times)" in warning["message"] for warning in told["warnings"])
    with pytest.raises(capacity.BadInput, match=r"traffic.output_tokens.mean: 500 tokens, measured with 200 \(2.50"):
        capacity.answer(document(output=500))
    assert capacity.answer(document(output=500, shape_tolerance={"refuse_ratio": 3}))["outcome"] == "answered"
    assert capacity.answer(document(prompt=100))["warnings"]
    tail = {"prompt_tokens": {"mean": 1000, "p95": 4000}}
    assert any(w["field"] == "traffic.prompt_tokens.p95" for w in capacity.answer(document(traffic=tail))["warnings"])
    with pytest.raises(capacity.BadInput, match="max_model_len of 4096"):
        capacity.answer(document(traffic=tail, measured={"max_model_len": 4096}))


# Units of money and time


def costs(**more):
    return {**copy.deepcopy(COSTS), **more}


def priced(rate=10.0, gpus_per_host=1, costs=COSTS, **more):
    return capacity.answer(document(rate, hosts={"gpus_per_host": gpus_per_host}, costs=costs, **more))


def test_a_month_is_730_hours_of_3600_seconds():
    told = priced(1.0)
    # 2,628,000 requests of 1000 x 1 + 200 x 2 millionths.
    assert told["months"][0]["api_per_month"] == pytest.approx(2_628_000 * 0.0014, abs=0.01)
    assert told["months"][0]["fleet_per_month"] == pytest.approx(1460)
    by_month = priced(1.0, costs=costs(host={"price_per_month": 1460}))
    assert by_month["costs"] == told["costs"]
    longer = priced(1.0, costs=costs(hours_per_month=365))
    assert longer["months"][0]["api_per_month"] == pytest.approx(told["months"][0]["api_per_month"] / 2, abs=0.01)
    assert longer["months"][0]["fleet_per_month"] == pytest.approx(730)


def test_the_api_is_paid_for_the_average_and_the_fleet_for_the_peak():
    whole, quarter = priced(), priced(costs=costs(average_to_peak=0.25))
    assert quarter["months"][0]["api_per_month"] == pytest.approx(whole["months"][0]["api_per_month"] / 4, abs=0.01)
    assert quarter["months"][0]["fleet_per_month"] == whole["months"][0]["fleet_per_month"]


def test_cached_tokens_have_their_own_price():
    api = {**COSTS["api"], "price_per_million_cached_input_tokens": 0.1}
    told = priced(1.0, costs=costs(api=api), traffic={"cached_share_of_prompt": 0.5})
    assert told["months"][0]["api_per_month"] == pytest.approx(2_628_000 * (500 + 50 + 400) / 1e6, abs=0.01)


def test_where_the_api_always_costs_less():
    told = priced(costs=costs(host={"price_per_hour": 1000}), traffic={"growth_percent_per_month": 50})
    assert told["costs"]["break_even_requests_per_second"] is None
    assert told["costs"]["break_even_month"] is None
    assert "at no traffic" in told["costs"]["no_break_even"]


def test_every_assumption_is_printed():
    text = "\n".join(priced()["assumptions"])
    for words in (
        "730 hours",
        "average over the month is 1 of",
        "head room",
        "EUR",
        "whole hosts",
        "compound",
        "cached",
    ):
        assert words in text


# Properties

lengths = st.integers(700, 1900)


@st.composite
def services(draw):
    count = draw(st.integers(1, 5))
    rates = draw(st.lists(st.floats(0.05, 50), min_size=count, max_size=count))
    points = [
        point(2**number, rate, draw(st.floats(10, 2000)), draw(st.floats(5, 100))) for number, rate in enumerate(rates)
    ]
    per_host = draw(st.sampled_from([1, 2, 4, 8]))
    return {
        "points": points,
        "prompt": draw(lengths),
        "output": draw(st.integers(120, 390)),
        "hosts": {"gpus_per_host": per_host},
        "measured": {"gpus_per_replica": draw(st.sampled_from([1, 2, 4, 16]))},
        "targets": {
            "ttft_p95_ms": draw(st.floats(10, 2000)),
            "head_room_share": draw(st.floats(0, 0.9)),
            "redundancy": draw(st.sampled_from(capacity.REDUNDANCIES)),
        },
    }


def fleet_of(service, rate, **targets):
    told = capacity.answer(document(rate, **copy.deepcopy({**service, "targets": {**service["targets"], **targets}})))
    assume(told["outcome"] == "answered")
    return tuple(told["months"][0][key] for key in ("replicas_for_traffic", "replicas", "gpus", "hosts"))


def never_fewer(small, large):
    return all(first <= second for first, second in zip(small, large, strict=True))


@given(services(), st.floats(0.01, 5000), st.floats(1, 10))
@settings(max_examples=150, deadline=None)
def test_more_traffic_never_needs_fewer(service, rate, factor):
    assert never_fewer(fleet_of(service, rate), fleet_of(service, rate * factor))


@given(services(), st.floats(0.01, 5000), st.floats(0, 0.95), st.floats(0, 0.95))
@settings(max_examples=150, deadline=None)
def test_more_head_room_never_needs_fewer(service, rate, one, other):
    low, high = sorted((one, other))
    assert never_fewer(fleet_of(service, rate, head_room_share=low), fleet_of(service, rate, head_room_share=high))


@given(services(), st.floats(0.01, 5000), st.floats(10, 2000), st.floats(10, 2000))
@settings(max_examples=100, deadline=None)
def test_a_stricter_target_never_needs_fewer(service, rate, one, other):
    low, high = sorted((one, other))
    assert never_fewer(fleet_of(service, rate, ttft_p95_ms=high), fleet_of(service, rate, ttft_p95_ms=low))


@given(services(), st.floats(0.01, 5000))
@settings(max_examples=100, deadline=None)
def test_no_replica_is_given_more_than_was_measured(service, rate):
    told = capacity.answer(document(rate, **copy.deepcopy(service)))
    assume(told["outcome"] == "answered")
    row, points = told["months"][0], service["points"]
    for key, length in (
        ("requests_per_second", 1),
        ("prompt_tokens_per_second", service["prompt"]),
        ("output_tokens_per_second", service["output"]),
    ):
        assert rate * length / row["replicas_for_traffic"] <= max(p[key] for p in points) * (1 + 1e-6)


@st.composite
def bills(draw):
    fleet = capacity.Fleet(
        draw(st.floats(0.1, 20)),
        draw(st.sampled_from([1, 2, 4, 8, 16])),
        draw(st.sampled_from([1, 4, 8])),
        draw(st.sampled_from(capacity.REDUNDANCIES)),
    )
    traffic = capacity.Traffic(1.0, throughput.Lengths(1000), throughput.Lengths(200), 5.0, draw(st.floats(0, 0.9)))
    prices = capacity.Prices(
        "EUR",
        draw(st.floats(0.01, 5)),
        draw(st.floats(0, 1)),
        draw(st.floats(0.01, 20)),
        draw(st.floats(100, 30_000)),
        730.0,
        draw(st.floats(0, 1)),
        draw(st.floats(0.05, 1)),
    )
    return capacity.Costs(traffic, fleet, prices)


@given(bills(), st.lists(st.floats(0.001, 0.999), min_size=5, max_size=5), st.lists(st.floats(1, 50), min_size=5))
@settings(max_examples=150, deadline=None)
def test_the_break_even_is_where_both_bills_are_equal(bill, before, after):
    first, lasting, why = bill.break_even()
    if first is None:
        assert why
        for factor in after:
            assert bill.fleet_month(factor * 10) > bill.api_month(factor * 10)
        return
    assert abs(bill.api_month(first) - bill.fleet_month(first)) < 0.01
    for part in before:
        assert bill.api_month(first * part) < bill.fleet_month(first * part)
    if lasting is None:
        assert why
        return
    assert lasting >= first * (1 - 1e-9)
    assert abs(bill.api_month(lasting) - bill.fleet_month(lasting)) < 0.01
    for factor in after:
        assert bill.fleet_month(lasting * factor) <= bill.api_month(lasting * factor) + 0.01


# Results of vllm bench serve

RESULT = {
    "date": "20261129-101500",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": None,
    "model_id": "chat",
    "tokenizer_id": "chat",
    "num_prompts": 100,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 8,
    "duration": 25.0,
    "completed": 100,
    "failed": 0,
    "total_input_tokens": 100_000,
    "total_output_tokens": 20_000,
    "request_throughput": 4.0,
    "request_goodput": None,
    "output_throughput": 800.0,
    "total_token_throughput": 4800.0,
    "max_output_tokens_per_s": 900.0,
    "max_concurrent_requests": 9,
    "rtfx": 0.0,
    "mean_ttft_ms": 120.0,
    "median_ttft_ms": 100.0,
    "std_ttft_ms": 10.0,
    "p95_ttft_ms": 200.0,
    "p99_ttft_ms": 300.0,
    "mean_tpot_ms": 9.0,
    "mean_itl_ms": 9.0,
    "p95_itl_ms": 20.0,
    "p99_itl_ms": 30.0,
}


def vllm(**more):
    said = throughput.Said()
    result = {key: value for key, value in {**RESULT, **more}.items() if value != "absent"}
    return (*throughput.read_vllm(result, "r", said), said.warnings)


def test_the_fields_of_a_result():
    read, (prompt, output), warnings = vllm()
    assert read == throughput.Point(8, 4.0, 800.0, 4000.0, 200.0, 20.0, 0.0)
    assert (prompt, output) == (throughput.Lengths(1000), throughput.Lengths(200))
    assert not warnings


def test_a_result_that_vllm_wrote():
    """vllm bench serve 0.32.0, --save-result, 64 tokens in and 16 out, against a server that only streams."""
    result = json.loads((FIXTURES / "vllm-0.32.0.json").read_text())
    said = throughput.Said()
    read, lengths = throughput.read_vllm(result, "r", said)
    assert lengths == (throughput.Lengths(64), throughput.Lengths(16))
    assert read.concurrency == 4
    assert read.prompt_tokens_per_second + read.output_tokens_per_second == pytest.approx(
        result["total_token_throughput"]
    )
    assert 20 < read.ttft_p95_ms < 1000
    assert 5 < read.itl_p95_ms < 100
    assert not said.warnings


def test_an_open_load_gets_its_concurrency_from_its_latency():
    assert vllm(max_concurrency=None, request_rate=4.0, mean_e2el_ms=2000.0)[0].concurrency == 8
    # 4 x (0.12 + 0.009 x 199)
    assert vllm(max_concurrency=None, request_rate=4.0)[0].concurrency == pytest.approx(7.644)
    with pytest.raises(throughput.BadInput, match="--max-concurrency"):
        vllm(max_concurrency=None, mean_tpot_ms="absent")


def test_p99_stands_in_for_p95_and_that_is_said():
    read, _, warnings = vllm(p95_ttft_ms="absent", p95_itl_ms="absent")
    assert (read.ttft_p95_ms, read.itl_p95_ms) == (300, 30)
    assert [warning["field"] for warning in warnings] == ["r.p95_ttft_ms", "r.p95_itl_ms"]
    assert "--metric-percentiles 50,95,99" in warnings[0]["message"]


def test_failures_and_few_requests():
    assert vllm(failed=25)[0].failed_share == 0.2
    assert vllm(failed="absent", num_prompts=125)[0].failed_share == 0.2
    assert "almost the largest" in vllm(completed=10)[2][0]["message"]


def test_lengths_of_a_detailed_result():
    lengths = [*range(1, 101)]
    _, (prompt, output), _ = vllm(input_lens=lengths, output_lens=[*[0] * 10, *lengths])
    assert (prompt.p95, output.p95) == (95, 95)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"ramp_up_strategy": "linear"}, "r.ramp_up_strategy"),
        ({"output_throughput": "absent"}, "r.output_throughput"),
        ({"completed": 0}, "r.completed"),
        ({"p95_ttft_ms": math.nan}, "r.p95_ttft_ms"),
    ],
)
def test_results_that_are_no_load_point(more, field):
    with pytest.raises(throughput.BadInput) as refused:
        vllm(**more)
    assert refused.value.field == field


# What is refused


def changed(path, value):
    given = copy.deepcopy(document(hosts={"gpus_per_host": 8}, costs=COSTS, targets={"ttft_p95_ms": 300}))
    *folders, last = path.split("/")
    place = given
    for folder in folders:
        place = place[int(folder) if folder.isdigit() else folder]
    if value == "absent":
        del place[last]
    else:
        place[last] = value
    return given


@pytest.mark.parametrize(
    ("path", "value", "field", "words"),
    [
        ("traffic", "absent", "traffic", "missing"),
        ("traffic", [], "traffic", "mapping"),
        ("measured", "absent", "measured", "missing"),
        ("measured", "file.yml", "measured", "mapping"),
        ("trafic", {}, "trafic", "Did you mean traffic"),
        ("traffic/requests_per_second_at_peak", 0, "traffic.requests_per_second_at_peak", "outside"),
        ("traffic/requests_per_second_at_peak", "20", "traffic.requests_per_second_at_peak", "needs a number"),
        ("traffic/requests_per_second_at_peak", True, "traffic.requests_per_second_at_peak", "needs a number"),
        ("traffic/requests_per_second_at_peak", math.inf, "traffic.requests_per_second_at_peak", "finite"),
        ("traffic/requests_per_second_at_peak", math.nan, "traffic.requests_per_second_at_peak", "finite"),
        ("traffic/prompt_tokens", 1000, "traffic.prompt_tokens", "mean, p95"),
        ("traffic/prompt_tokens/mean", -1, "traffic.prompt_tokens.mean", "outside"),
        ("traffic/cached_share_of_prompt", 1, "traffic.cached_share_of_prompt", "below 1"),
        ("traffic/cached_share_of_prompt", 30, "traffic.cached_share_of_prompt", "for 30% write 0.3"),
        ("traffic/growth_percent_per_month", -100, "traffic.growth_percent_per_month", "outside"),
        ("measured/points", [], "measured.points", "at least one"),
        ("measured/points/1/concurrency", "absent", "measured.points[1].concurrency", "missing"),
        ("measured/points/1/ttft_p95_ms", "absent", "measured.points[concurrency 8].ttft_p95_ms", "targets.ttft"),
        # By the minute instead of by the second:
        ("measured/points/0/output_tokens_per_second", 12000, "measured.points[0].output_tokens_per_second", "per sec"),
        ("measured/points/0/ttft_p95_s", 1, "measured.points[0].ttft_p95_s", "Did you mean ttft_p95_ms"),
        ("measured/gpus_per_replica", "absent", "measured.gpus_per_replica", "missing"),
        ("measured/gpus_per_replica", 1.5, "measured.gpus_per_replica", "whole"),
        ("measured/output_tokens", "absent", "measured.output_tokens", "missing"),
        ("targets/head_room_share", 1, "targets.head_room_share", "below 1"),
        ("targets/redundancy", "rack", "targets.redundancy", "none, replica, host"),
        ("hosts", "absent", "hosts.gpus_per_host", "paid for whole"),
        ("months", 121, "months", "outside"),
        ("months", 1.5, "months", "whole"),
        ("costs/currency", "absent", "costs.currency", "EUR"),
        ("costs/average_to_peak", "absent", "costs.average_to_peak", "at peak"),
        ("costs/average_to_peak", 1.1, "costs.average_to_peak", "outside"),
        ("costs/host/price_per_month", 5, "costs.host.price_per_hour", "one of them"),
        ("costs/host/price_per_hour", "absent", "costs.host.price_per_hour", "one of them"),
        ("costs/api", "absent", "costs.api", "missing"),
        ("costs/api/price_per_million_output_tokens", "absent", "costs.api.price_per_million_output_tokens", "missing"),
        ("costs/hours_per_month", 800, "costs.hours_per_month", "outside"),
        ("shape_tolerance", {"tell_ratio": 0.5}, "shape_tolerance.tell_ratio", "outside"),
    ],
)
def test_bad_input_names_its_field(path, value, field, words):
    with pytest.raises(capacity.BadInput) as refused:
        capacity.answer(changed(path, value))
    assert refused.value.field == field
    assert words in refused.value.reason


@pytest.mark.parametrize("given", [None, [], "text", 5])
def test_a_file_that_is_no_mapping(given):
    with pytest.raises(capacity.BadInput, match="the file: needs a mapping"):
        capacity.answer(given)


# The command


def fleet(*arguments, stdin=None):
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["capacity", *map(str, arguments)], input=stdin)


def test_the_table_in_eighty_columns():
    done = fleet("--from", EXAMPLE)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0].split() == [
        *("month", "req/s", "replicas", "spare", "GPUs", "hosts", "load", "API", "EUR", "fleet", "EUR", "decided", "by")
    ]
    assert lines[1].split() == ["now", "20", "6", "3", "6", "2", "37%", "10,092", "10,950", "TTFT", "p95"]
    assert lines[7].split()[0] == "+6"
    assert "730 hours" in done.output


def test_json_and_months():
    done = fleet("--from", EXAMPLE, "--json", "--months", 2)
    assert [row["month"] for row in json.loads(done.stdout)["months"]] == [0, 1, 2]
    assert json.loads(done.stdout) == capacity.answer(yaml.safe_load(EXAMPLE.read_text()), 2)


def test_from_python_it_is_the_same_answer(tmp_path):
    """The input is a file, or what is in it; a path in a mapping is looked up where the program runs."""
    content = yaml.safe_load(EXAMPLE.read_text())
    assert api.capacity(EXAMPLE, months=2) == api.capacity(content, months=2) == capacity.answer(content, 2)
    (tmp_path / "measured.yml").write_text(yaml.safe_dump(content["measured"]))
    given = {**content, "measured": str(tmp_path / "measured.yml")}
    assert api.capacity(given) == api.capacity(content)
    assert api.capacity({**content, "measured": {}}, tmp_path / "measured.yml") == api.capacity(content)
    assert given["measured"] == str(tmp_path / "measured.yml"), "the caller's own is not changed"
    for wrong, words in (
        ({}, "traffic: missing"),
        ({**content, "trafic": {}}, "Did you mean traffic"),
        (tmp_path / "none", "No such"),
    ):
        with pytest.raises(ValueError, match=words):
            api.capacity(wrong)


def test_exit_status_1_where_the_targets_cannot_be_met():
    text = yaml.safe_dump(document(targets={"itl_p95_ms": 1}))
    done = fleet("--from", "-", stdin=text)
    assert done.exit_code == 1
    assert "ITL p95 of 1 ms is met at no measured point" in " ".join(done.output.split())
    assert json.loads(fleet("--from", "-", "--json", stdin=text).stdout)["outcome"] == "cannot_be_met"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "--from: -: not YAML at line 1"),
        ("", "needs a mapping"),
        ("measured: nowhere.yml", "measured: nowhere.yml: No such file"),
        ("measured: {bench_results: x}", "measured.bench_results: needs a list"),
        ("measured: {points: 5, bench_results: []}", "measured.points: needs a list"),
    ],
)
def test_exit_status_2_with_one_message(text, words):
    done = fleet("--from", "-", stdin=text)
    assert done.exit_code == 2
    assert words in done.output
    assert len(done.output.splitlines()) == 1
    assert json.loads(fleet("--from", "-", "--json", stdin=text).stdout)["outcome"] == "refused"


def test_usage():
    assert fleet().exit_code == 2
    assert fleet("--from", EXAMPLE, "--months", 500).exit_code == 2
    assert fleet("--from", EXAMPLE.with_name("none.yml")).exit_code == 2


def test_measured_from_files_beside_the_input(tmp_path):
    given = document(targets={"ttft_p95_ms": 300})
    measured = {key: value for key, value in given["measured"].items() if key != "points"}
    for key in ("prompt_tokens", "output_tokens"):
        del measured[key]
    (tmp_path / "sweep").mkdir()
    # As --append-result writes them: one after the other.
    slow = {
        **RESULT,
        "max_concurrency": 16,
        "request_throughput": 6.0,
        "output_throughput": 1200.0,
        "duration": 100 / 6,
    }
    slow["p95_ttft_ms"] = 400.0
    (tmp_path / "sweep" / "all.json").write_text(json.dumps(RESULT) + "\n" + json.dumps(slow))
    (tmp_path / "sweep" / "chat.yml").write_text(yaml.safe_dump({**measured, "bench_results": ["all.json"]}))
    (tmp_path / "in.yml").write_text(yaml.safe_dump({**given, "measured": "sweep/chat.yml"}))
    told = json.loads(fleet("--from", tmp_path / "in.yml", "--json").stdout)
    # Halfway from 200 ms to 400 ms: 5 requests/s.
    assert told["replica"]["requests_per_second"] == pytest.approx(5)
    assert told["measured"]["model"] == "chat"
    (tmp_path / "in.yml").write_text(yaml.safe_dump({**given, "measured": "elsewhere.yml"}))
    again = fleet("--from", tmp_path / "in.yml", "--measured", tmp_path / "sweep" / "chat.yml", "--json")
    assert json.loads(again.stdout) == told
    for text, words in (("", "empty"), ("{", "not JSON"), ("{}", "no result")):
        (tmp_path / "sweep" / "all.json").write_text(text)
        done = fleet("--from", tmp_path / "in.yml", "--measured", tmp_path / "sweep" / "chat.yml")
        assert done.exit_code == 2
        assert words in done.output


def test_a_number_of_many_digits_is_bad_input():
    with pytest.raises(throughput.BadInput, match="400 digits"):
        throughput._number(int("9" * 400), "traffic.x", 0, 1e9)
