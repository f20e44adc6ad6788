# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The measured throughput of one replica: what a load test writes and the capacity table reads.

Units are in the names: requests_per_second, ..._tokens_per_second, ..._ms; shares go from 0 to 1. docs/capacity.md has
the format.

Fields of `vllm bench serve --save-result` are as vllm/benchmarks/serve.py of 0.33.0 writes them (0.26.0 has the same
ones): request_throughput, output_throughput, failed, completed, duration, total_input_tokens, total_output_tokens in
`benchmark` (lines 1320-1330), max_concurrency and request_rate ("inf" for none) in `main_async` (2326-2335),
mean_*_ms and pN_*_ms in `process_one_metric` (1426-1432). Percentiles are those of --metric-percentiles, whose default
is 99 alone (1859-1865).

Pure: standard library, Python 3.9 and newer, no Ansible import. Data comes as arguments.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import did_you_mean

SMALL = 1e-9  # the least of what is divided by
FEW = 40  # below so many requests the 95th percentile is one of the two largest values
RATES = ("requests_per_second", "output_tokens_per_second", "prompt_tokens_per_second")


class BadInput(ValueError):
    """A field that is missing or cannot be used. `field` is its path, such as traffic.prompt_tokens.mean."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt or of an answer."""

    mean: float
    p95: Optional[float] = None


@dataclass(frozen=True)
class Point:
    """One replica under one load. A latency is None where it was not measured."""

    concurrency: float
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    ttft_p95_ms: Optional[float] = None
    itl_p95_ms: Optional[float] = None
    failed_share: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Points of one replica in the order of concurrency, and what they were measured on."""

    points: Tuple[Point, ...]
    prompt: Lengths
    output: Lengths
    gpus_per_replica: int
    cached_share: float
    max_model_len: Optional[int]
    about: Mapping[str, Any]  # service, model, gpu, release, date


@dataclass
class Said:
    """What the reader must know beside the numbers."""

    warnings: List[Dict[str, str]] = field(default_factory=list)
    assumptions: List[str] = field(default_factory=list)

    def warn(self, where: str, message: str) -> None:
        self.warnings.append({"field": where, "message": message})


class Fields:
    """A mapping of the input, its path, and the keys that it may have."""

    def __init__(self, value: Any, path: str, known: Sequence[str]) -> None:
        if not isinstance(value, Mapping):
            raise BadInput(path or "the file", f"needs a mapping with {', '.join(known)}, not {_shown(value)}")
        for key in value:
            if key not in known:
                hint = did_you_mean(key, known)
                raise BadInput(_join(path, key), f"not known. {hint}Known here: {', '.join(known)}")
        self.value, self.path = value, path

    def where(self, key: str) -> str:
        return _join(self.path, key)

    def get(self, key: str) -> Any:
        return self.value.get(key)

    def must(self, key: str, why: str = "") -> Any:
        if self.value.get(key) is None:
            raise BadInput(self.where(key), f"missing{'; ' + why if why else ''}")
        return self.value[key]

    def number(self, key: str, least: float = 0.0, most: float = 1e12, why: str = "", open_end: bool = False) -> float:
        """The number at `key`, from `least` up to `most` (`open_end`: below it)."""
        return _number(self.must(key, why), self.where(key), least, most, open_end)

    def optional(self, key: str, default: Any, **limits: Any) -> Any:
        return default if self.value.get(key) is None else self.number(key, **limits)

    def share(self, key: str, default: float = 0.0) -> float:
        return self.optional(key, default, most=1.0, open_end=True)

    def whole(self, key: str, least: int = 1, most: int = 10_000_000) -> int:
        number = self.number(key, least, most)
        if number != int(number):
            raise BadInput(self.where(key), f"{number:g} is not a whole number")
        return int(number)

    def text(self, key: str) -> Optional[str]:
        value = self.value.get(key)
        if isinstance(value, (Mapping, list)):
            raise BadInput(self.where(key), f"needs a text, not {_shown(value)}")
        return None if value is None else str(value)

    def lengths(self, key: str) -> Lengths:
        inner = Fields(self.must(key), self.where(key), ("mean", "p95"))
        return Lengths(inner.number("mean", 1.0, 1e8), inner.optional("p95", None, least=1.0, most=1e8))


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


MOST_NUMBER = 10**15


def _number(value: Any, where: str, least: float, most: float, open_end: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadInput(where, f"needs a number, not {_shown(value)}")
    if isinstance(value, int) and abs(value) > MOST_NUMBER:
        raise BadInput(where, f"needs a number that makes sense, not one of {len(str(abs(value)))} digits")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(where, f"needs a finite number, not {value}")
    if not least <= value <= most or (open_end and value == most):
        hint = f"; for {value:g}% write {value / 100:g}" if most == 1 and 1 <= value <= 100 else ""
        span = f"from {least:g} to below {most:g}" if open_end else f"from {least:g} to {most:g}"
        raise BadInput(where, f"{value:g} is outside {span}{hint}")
    return float(value)


ABOUT = ("service", "model", "gpu", "release", "date")
MEASURED = (
    *ABOUT,
    "gpus_per_replica",
    "prompt_tokens",
    "output_tokens",
    "cached_share_of_prompt",
    "max_model_len",
    "points",
)
POINT = ("concurrency", *RATES, "ttft_p95_ms", "itl_p95_ms", "failed_share")


def read_measured(value: Any, said: Said, path: str = "measured") -> Measured:
    """The measured throughput of one replica: points of our own format, results of vllm bench serve, or both."""
    given = Fields(value, path, MEASURED)
    rows = given.must("points")
    if not isinstance(rows, list) or not rows:
        raise BadInput(given.where("points"), f"needs a list with at least one point, not {_shown(rows)}")
    points, seen = [], []
    about = {key: given.text(key) for key in ABOUT}
    for number, row in enumerate(rows):
        where = f"{given.where('points')}[{number}]"
        if isinstance(row, Mapping) and "request_throughput" in row:
            point, lengths = read_vllm(row, where, said)
            seen.append(lengths)
            about["model"] = about["model"] or (str(row["model_id"]) if row.get("model_id") else None)
            about["date"] = about["date"] or (str(row["date"]) if row.get("date") else None)
        else:
            point = _own_point(row, where)
        points.append(point)
    prompt, output = (
        given.lengths(key) if given.get(key) is not None else _typical(seen, side, given.where(key))
        for side, key in enumerate(("prompt_tokens", "output_tokens"))
    )
    for number, point in enumerate(points):
        _check_units(point, f"{given.where('points')}[{number}]", prompt, output, said)
    for key, name in (("gpu", "on which GPUs"), ("release", "with which release"), ("date", "when")):
        if about[key] is None:
            said.warn(given.where(key), f"missing: nobody can tell {name} this was measured")
    return Measured(
        _medians(points),
        prompt,
        output,
        given.whole("gpus_per_replica", 1, 100_000),
        given.share("cached_share_of_prompt"),
        given.whole("max_model_len") if given.get("max_model_len") is not None else None,
        about,
    )


def _own_point(row: Any, where: str) -> Point:
    given = Fields(row, where, POINT)
    return Point(
        given.number("concurrency", SMALL, 1e7),
        given.number("requests_per_second", SMALL, 1e9),
        given.number("output_tokens_per_second", SMALL),
        given.number("prompt_tokens_per_second", SMALL),
        given.optional("ttft_p95_ms", None),
        given.optional("itl_p95_ms", None),
        given.optional("failed_share", 0.0, most=1.0),
    )


def read_vllm(result: Mapping[str, Any], where: str, said: Said) -> Tuple[Point, Tuple[Lengths, Lengths]]:
    """A point, and the lengths of prompts and outputs, from one result of `vllm bench serve --save-result`.

    Concurrency is max_concurrency. Where the load was open (no --max-concurrency) it is rate x mean latency (Little's
    law, as vLLM's own sweep estimates it: benchmarks/sweep/serve_workload.py, _estimate_workload_value). Lengths at
    p95 are known only with --save-detailed.
    """
    given = Fields(result, where, tuple(result))
    if given.get("ramp_up_strategy") is not None:
        raise BadInput(given.where("ramp_up_strategy"), "a ramp's averages are no load of their own; measure one rate")
    done = given.whole("completed", 1)
    seconds = given.number("duration", SMALL)
    rate = given.number("request_throughput", SMALL, 1e9)
    prompt, output = (
        given.number("total_input_tokens", 1.0),
        given.number("total_output_tokens", 1.0, why="the result of a pooling model has none"),
    )
    if given.get("failed") is not None:
        failed = given.number("failed")
    else:
        failed = max(0.0, given.optional("num_prompts", float(done)) - done)
    if done < FEW:
        said.warn(where, f"{done} requests completed: the 95th percentile of so few is almost the largest value")
    point = Point(
        _concurrency(given, rate, output / done),
        rate,
        given.number("output_throughput", SMALL),
        prompt / seconds,
        _p95(given, "ttft", said),
        _p95(given, "itl", said),
        failed / (failed + done),
    )
    return point, (
        Lengths(prompt / done, _p95_of(result.get("input_lens"))),
        Lengths(output / done, _p95_of([length for length in result.get("output_lens") or [] if length])),
    )


def _concurrency(given: Fields, rate: float, output: float) -> float:
    if given.get("max_concurrency") is not None:
        return given.number("max_concurrency", SMALL, 1e7)
    if given.get("mean_e2el_ms") is not None:
        return rate * given.number("mean_e2el_ms", SMALL) / 1000
    if given.get("mean_ttft_ms") is not None and given.get("mean_tpot_ms") is not None:
        # TPOT is (latency - TTFT) / (output tokens - 1): calculate_metrics, serve.py.
        return rate * (given.number("mean_ttft_ms") + given.number("mean_tpot_ms") * max(0.0, output - 1)) / 1000
    raise BadInput(
        given.where("max_concurrency"),
        "not set, and no mean latency to count it from; measure with --max-concurrency, or with "
        "--percentile-metrics ttft,tpot,itl,e2el",
    )


def _p95(given: Fields, metric: str, said: Said) -> Optional[float]:
    if given.get(f"p95_{metric}_ms") is not None:
        return given.number(f"p95_{metric}_ms")
    if given.get(f"p99_{metric}_ms") is None:
        return None
    said.warn(
        given.where(f"p95_{metric}_ms"),
        f"not in the result; p99_{metric}_ms, which is never less, stands in for it. "
        "Measure with --metric-percentiles 50,95,99",
    )
    return given.number(f"p99_{metric}_ms")


def _p95_of(lengths: Any) -> Optional[float]:
    """The smallest value that 95% of a list do not exceed."""
    if not isinstance(lengths, list) or not lengths or not all(isinstance(length, int) for length in lengths):
        return None
    return float(sorted(lengths)[math.ceil(0.95 * len(lengths)) - 1])


def _typical(seen: Sequence[Tuple[Lengths, Lengths]], side: int, where: str) -> Lengths:
    """The lengths of all results together: prompts (side 0) or outputs (side 1)."""
    if not seen:
        raise BadInput(where, "missing; the lengths that were measured with decide what traffic the numbers hold for")
    tails = [pair[side].p95 for pair in seen]
    known = [tail for tail in tails if tail is not None]
    return Lengths(median(pair[side].mean for pair in seen), median(known) if len(known) == len(tails) else None)


def _check_units(point: Point, where: str, prompt: Lengths, output: Lengths, said: Said) -> None:
    """Tokens per second must be about requests per second x tokens: a number by the minute is found here."""
    for key, lengths in (("prompt_tokens_per_second", prompt), ("output_tokens_per_second", output)):
        per_request = getattr(point, key) / point.requests_per_second
        ratio = per_request / lengths.mean
        text = (
            f"{getattr(point, key):g} at {point.requests_per_second:g} requests per second are {per_request:.6g} tokens "
            f"a request, where the measured mean is {lengths.mean:g}"
        )
        if not 0.5 <= ratio <= 2:
            raise BadInput(f"{where}.{key}", f"{text}; are all rates per second and of one replica?")
        if not 0.9 <= ratio <= 1.1:
            said.warn(f"{where}.{key}", text)


def _medians(points: Sequence[Point]) -> Tuple[Point, ...]:
    """Repeats at the same concurrency become their median, field by field."""
    groups: Dict[float, List[Point]] = {}
    for point in points:
        groups.setdefault(point.concurrency, []).append(point)
    merged = []
    for concurrency in sorted(groups):
        values: Dict[str, Any] = {}
        for key in asdict(groups[concurrency][0]):
            column = [getattr(point, key) for point in groups[concurrency]]
            values[key] = None if any(value is None for value in column) else median(column)
        merged.append(Point(**values))
    return tuple(merged)
