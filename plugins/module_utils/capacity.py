# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How many replicas and GPUs a traffic needs, now and month by month, and what it costs beside an API.

Everything counted stands on measured points of one replica. Between two neighbours it is interpolated on the straight
line; past the measured points nothing is assumed, more replicas are counted instead. No price is built in.

Units are in the names: requests_per_second, ..._tokens_per_second, ..._ms; shares go from 0 to 1, growth is in percent
a month. docs/capacity.md has the input, the answer and the formulas; throughput.py reads what was measured.

Pure: standard library, Python 3.9 and newer, no Ansible import. Data comes as arguments.
"""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.throughput import (
    SMALL,
    BadInput,
    Fields,
    Lengths,
    Measured,
    Point,
    Said,
    read_measured,
)

# The break-even is looked for this far: months ahead, and replicas of one service.
MONTHS, REPLICAS = 120, 100_000
# How near two limits are to be named together; how far a whole number may be off by rounding.
ALIKE, ROUNDING = 0.01, 1e-9
HOURS_PER_MONTH = 730.0  # 365 days x 24 hours / 12
REDUNDANCIES = ("none", "replica", "host")
# Above the first ratio a length that differs from the measured one is told, above the second it is refused.
TELL, REFUSE = 1.25, 2.0

LIMITS = {"ttft_p95_ms": "TTFT p95", "itl_p95_ms": "ITL p95", "failed_share": "failed requests"}


@dataclass(frozen=True)
class Traffic:
    """What arrives at the busiest time, all replicas together."""

    requests_per_second: float
    prompt: Lengths
    output: Lengths
    growth_percent_per_month: float
    cached_share: float

    def at(self, month: int) -> float:
        """Requests per second at peak, so many months from now: growth is compound."""
        return self.requests_per_second * (1 + self.growth_percent_per_month / 100) ** month


@dataclass(frozen=True)
class Targets:
    """What has to hold. A latency of None is not asked for."""

    ttft_p95_ms: Optional[float]
    itl_p95_ms: Optional[float]
    failed_share: float
    head_room_share: float
    redundancy: str


@dataclass(frozen=True)
class Prices:
    """The user's own prices, in one currency; tokens by the million, a host by the month."""

    currency: str
    input: float
    cached: float
    output: float
    host_per_month: float
    hours_per_month: float
    added_share: float  # electricity and administration, as a share of the host's price
    average_to_peak: float


# Reading -------------------------------------------------------------------------------------------------------------


def read_traffic(value: Any, path: str = "traffic") -> Traffic:
    given = Fields(
        value,
        path,
        (
            "requests_per_second_at_peak",
            "prompt_tokens",
            "output_tokens",
            "growth_percent_per_month",
            "cached_share_of_prompt",
        ),
    )
    return Traffic(
        given.number("requests_per_second_at_peak", SMALL, 1e9),
        given.lengths("prompt_tokens"),
        given.lengths("output_tokens"),
        given.optional("growth_percent_per_month", 0.0, least=-99.0, most=1000.0),
        given.share("cached_share_of_prompt"),
    )


def read_targets(value: Any, path: str = "targets") -> Targets:
    given = Fields(
        {} if value is None else value,
        path,
        ("ttft_p95_ms", "itl_p95_ms", "failed_share", "head_room_share", "redundancy"),
    )
    redundancy = given.text("redundancy") or "none"
    if redundancy not in REDUNDANCIES:
        raise BadInput(given.where("redundancy"), f"{redundancy!r} is none of {', '.join(REDUNDANCIES)}")
    return Targets(
        given.optional("ttft_p95_ms", None, least=SMALL),
        given.optional("itl_p95_ms", None, least=SMALL),
        given.share("failed_share"),
        given.share("head_room_share"),
        redundancy,
    )


def read_prices(value: Any, path: str = "costs") -> Prices:
    given = Fields(value, path, ("currency", "api", "host", "hours_per_month", "average_to_peak"))
    api = Fields(
        given.must("api"),
        given.where("api"),
        (
            "price_per_million_input_tokens",
            "price_per_million_cached_input_tokens",
            "price_per_million_output_tokens",
        ),
    )
    host = Fields(
        given.must("host"),
        given.where("host"),
        ("price_per_hour", "price_per_month", "electricity_share", "admin_share"),
    )
    hours = given.optional("hours_per_month", HOURS_PER_MONTH, least=1.0, most=744.0)
    if (host.get("price_per_hour") is None) == (host.get("price_per_month") is None):
        raise BadInput(host.where("price_per_hour"), "give either this or price_per_month, one of them")
    if host.get("price_per_hour") is not None:
        month = host.number("price_per_hour", SMALL, 1e9) * hours
    else:
        month = host.number("price_per_month", SMALL)
    ratio = given.number("average_to_peak", SMALL, 1.0, why="average requests per second over the month / at peak")
    paid = api.number("price_per_million_input_tokens", 0.0, 1e9)
    prices = Prices(
        given.text("currency") or "",
        paid,
        api.optional("price_per_million_cached_input_tokens", paid, most=1e9),
        api.number("price_per_million_output_tokens", 0.0, 1e9),
        month,
        hours,
        host.optional("electricity_share", 0.0, most=10.0) + host.optional("admin_share", 0.0, most=10.0),
        ratio,
    )
    if not prices.currency:
        raise BadInput(given.where("currency"), "missing; name the one that all prices are in, such as EUR")
    if prices.input + prices.output <= 0:
        raise BadInput(api.where("price_per_million_input_tokens"), "the API's prices are all 0; leave out costs")
    return prices


# One replica ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replica:
    """The most that one replica is counted for, in requests per second of this traffic, before head room."""

    point: Point
    between: Optional[Tuple[float, float]]  # concurrency of both neighbours, where it is interpolated
    rates: Mapping[str, float]  # by what: prefill throughput, decode throughput, request rate
    unlimited: float  # the same with no latency asked for
    limited_by: Tuple[str, ...]  # what the point of `unlimited` does not keep

    @property
    def requests_per_second(self) -> float:
        return min(self.rates.values())

    @property
    def binding(self) -> str:
        """What keeps one replica from more: a target, where a measured point that misses it carries more; else the
        rate that is reached first, prefill and decode together where the traffic has the measured mix.
        """
        if self.unlimited > self.requests_per_second * (1 + ROUNDING):
            latency = [LIMITS[key] for key in self.limited_by if key != "failed_share"]
            return f"latency ({' and '.join(latency)})" if latency else LIMITS["failed_share"]
        least = min(self.rates.values()) * (1 + ALIKE)
        names = [name for name, rate in self.rates.items() if rate <= least]
        tokens = [name.split()[0] for name in names if name != "request rate"]
        return f"{' and '.join(tokens)} throughput" if tokens else names[0]


def rates(point: Point, traffic: Traffic, measured: Measured) -> Dict[str, float]:
    """Requests per second of this traffic at which one replica does what it did at a measured point, and no more.

    A load that is not above the measured one in requests, in prompt tokens to compute and in output tokens is one that
    the replica has carried. Prompt tokens that come out of the prefix cache are not computed.
    """
    computed = point.prompt_tokens_per_second * (1 - measured.cached_share)
    return {
        "prefill throughput": computed / (traffic.prompt.mean * (1 - traffic.cached_share)),
        "decode throughput": point.output_tokens_per_second / traffic.output.mean,
        "request rate": point.requests_per_second,
    }


def _asked(targets: Targets) -> Dict[str, float]:
    values = {key: getattr(targets, key) for key in LIMITS}
    return {key: value for key, value in values.items() if value is not None}


def _missed(point: Point, asked: Mapping[str, float]) -> Tuple[str, ...]:
    return tuple(key for key, most in asked.items() if getattr(point, key) > most)


def _mixed(low: Point, high: Point, part: float) -> Point:
    values: Dict[str, Any] = {}
    for key, first in asdict(low).items():
        second = getattr(high, key)
        values[key] = None if first is None or second is None else first + (second - first) * part
    return Point(**values)


def _good(points: Sequence[Point], asked: Mapping[str, float]) -> Iterator[Tuple[Point, Optional[Tuple[float, float]]]]:
    """Every measured point that keeps what is asked, and the last good spot between a good and a bad neighbour."""
    for point in points:
        if not _missed(point, asked):
            yield point, None
    for second in range(1, len(points)):
        low, high = points[second - 1 : second + 1]
        if bool(_missed(low, asked)) == bool(_missed(high, asked)):
            continue
        good, bad = (high, low) if _missed(low, asked) else (low, high)
        part = min(
            (asked[key] - getattr(good, key)) / (getattr(bad, key) - getattr(good, key)) for key in _missed(bad, asked)
        )
        if part > 0:
            yield _mixed(good, bad, part), (low.concurrency, high.concurrency)


def replica(traffic: Traffic, measured: Measured, targets: Targets) -> Optional[Replica]:
    """What one replica is counted for, or None where no measured point keeps the targets."""
    asked = _asked(targets)
    for key in asked:
        for point in measured.points:
            if getattr(point, key) is None:
                raise BadInput(
                    f"measured.points[concurrency {point.concurrency:g}].{key}",
                    f"missing, and targets.{key} asks for it",
                )

    def most(point: Point) -> float:
        return min(rates(point, traffic, measured).values())

    candidates = list(_good(measured.points, asked))
    if not candidates:
        return None
    best, between = max(candidates, key=lambda pair: most(pair[0]))
    free = max(measured.points, key=most)
    return Replica(best, between, rates(best, traffic, measured), most(free), _missed(free, asked))


def _unmet(measured: Measured, targets: Targets) -> List[str]:
    """Why no measured point will do, with the nearest one of each target."""
    asked, lines = _asked(targets), []
    for key, most in asked.items():
        near = min(measured.points, key=operator.attrgetter(key))
        if getattr(near, key) > most:
            lines.append(
                f"targets.{key}: {LIMITS[key]} of {most:g}{_unit(key)} is met at no measured point; the least is "
                f"{getattr(near, key):g}{_unit(key)}, at concurrency {near.concurrency:g}"
            )
    if not lines:
        names = " and ".join(LIMITS[key] for key in asked)
        lines.append(f"targets: {names} are each met at some measured point, at none together")
    return lines


def _unit(key: str) -> str:
    return " ms" if key.endswith("_ms") else ""


# The fleet -----------------------------------------------------------------------------------------------------------


def _ceil(value: float) -> int:
    """The next whole number; what is a whole number but for rounding stays it."""
    return math.ceil(value * (1 - ROUNDING))


@dataclass(frozen=True)
class Fleet:
    """Replicas, GPUs and hosts for a rate, with head room and redundancy."""

    per_replica: float  # requests per second, head room taken off
    gpus_per_replica: int
    gpus_per_host: Optional[int]
    redundancy: str

    def needed(self, requests_per_second: float) -> int:
        """Replicas that the traffic alone needs; at least one."""
        return max(1, _ceil(requests_per_second / self.per_replica))

    def spare(self, needed: int) -> int:
        """Replicas on top, so that `needed` are left when one replica, or the host with the most of them, is lost.

        A lost host takes as many replicas with it as fit on one, and no more than `needed`: with fewer than a host
        full they are spread over two hosts.
        """
        if self.redundancy == "none":
            return 0
        return 1 if self.redundancy == "replica" else min(max(1, self.fit), needed)

    @property
    def fit(self) -> int:
        """Replicas that fit on one host; 0 where one takes several hosts."""
        assert self.gpus_per_host is not None
        return self.gpus_per_host // self.gpus_per_replica

    @property
    def hosts_of_a_replica(self) -> int:
        """Hosts that one replica reaches over."""
        assert self.gpus_per_host is not None
        return -(-self.gpus_per_replica // self.gpus_per_host)

    def hosts(self, needed: int) -> int:
        """Hosts for `needed` replicas and what redundancy adds. GPUs of a host that no replica can use are idle."""
        total = needed + self.spare(needed)
        full = -(-total // self.fit) if self.fit else total * self.hosts_of_a_replica
        return max(2, full) if self.redundancy == "host" else full


def row(traffic: Traffic, month: int, fleet: Fleet, one: Replica) -> Dict[str, Any]:
    """What one month needs at peak, and what that number of replicas is due to."""
    peak = traffic.at(month)
    needed = fleet.needed(peak)
    spare = fleet.spare(needed)
    total = needed + spare
    head_room = fleet.per_replica / one.requests_per_second
    binding = one.binding if needed > 1 else "redundancy" if spare else "smallest fleet"
    return {
        "month": month,
        "requests_per_second": peak,
        "prompt_tokens_per_second": peak * traffic.prompt.mean,
        "output_tokens_per_second": peak * traffic.output.mean,
        "replicas_for_traffic": needed,
        "replicas_for_redundancy": spare,
        "replicas": total,
        "gpus": total * fleet.gpus_per_replica,
        "hosts": fleet.hosts(needed) if fleet.gpus_per_host else None,
        "binding": binding,
        "replicas_by": {name: peak / (rate * head_room) for name, rate in one.rates.items()},
        "load_share": peak / (total * one.requests_per_second),
    }


# Costs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Both bills of a month, as functions of the requests per second at peak."""

    traffic: Traffic
    fleet: Fleet
    prices: Prices

    @property
    def host(self) -> float:
        """A host's month with electricity and administration."""
        return self.prices.host_per_month * (1 + self.prices.added_share)

    @property
    def per_request_per_second(self) -> float:
        """The API's bill for a month of traffic that peaks at one request per second."""
        computed = self.traffic.prompt.mean * (1 - self.traffic.cached_share) * self.prices.input
        cached = self.traffic.prompt.mean * self.traffic.cached_share * self.prices.cached
        request = (computed + cached + self.traffic.output.mean * self.prices.output) / 1e6
        return request * self.prices.average_to_peak * self.prices.hours_per_month * 3600

    def api_month(self, peak: float) -> float:
        return peak * self.per_request_per_second

    def fleet_month(self, peak: float) -> float:
        return self._of(self.fleet.needed(peak))

    def _of(self, needed: int) -> float:
        return self.fleet.hosts(needed) * self.host

    def break_even(self) -> Tuple[Optional[float], Optional[float], str]:
        """Requests per second at peak where the bills are equal: the first time, and the time after which the fleet is
        never dearer again; None where there is none, with the reason as the third.

        The API's bill is a straight line from 0. The fleet's is flat and jumps up, by hosts. So the API's bill can pass
        the fleet's only where it rises to it, which is a spot where they are equal; at a jump the fleet can become the
        dearer one again, so there can be several spots. The first is in the smallest fleet whose bill its full load
        earns; the last is in the largest fleet that is the dearer one when it has just grown to its size.
        """
        slope, fit = self.per_request_per_second, self.fleet.fit
        earned = slope * self.fleet.per_replica
        a_replica = self.host * (1 / fit if fit else self.fleet.hosts_of_a_replica)
        if earned < a_replica * (1 - ROUNDING):
            return None, None, "at no traffic: a fully loaded replica's share of a host costs more than the API"
        # Rounding up and redundancy add at most 2 hosts, or one replica's hosts, to the replicas' own shares.
        added = self.host * max(2, self.fleet.hosts_of_a_replica)
        surplus = max(0.0, earned - a_replica)
        largest = (added + earned) / surplus + 1 if surplus else math.inf
        first = last = None
        for needed in range(1, int(min(largest, REPLICAS)) + 1):
            bill = self._of(needed)
            if first is None and bill <= earned * needed * (1 + ROUNDING / 2):
                first = bill / slope
            if bill > earned * (needed - 1) * (1 + 2 * ROUNDING):
                last = bill / slope
        if largest > REPLICAS:
            return first, None, f"looked at up to {REPLICAS} replicas: nearly equal costs do not settle below that"
        return first, last, ""

    def month(self, months: int = MONTHS) -> Optional[int]:
        """The first month, 0 for now, in which the fleet is not dearer than the API; None: in none of them."""
        for month in range(months + 1):
            peak = self.traffic.at(month)
            if self.fleet_month(peak) <= self.api_month(peak):
                return month
        return None


# The answer ----------------------------------------------------------------------------------------------------------


def answer(document: Any, months: Optional[int] = None) -> Dict[str, Any]:
    """The whole answer for one input file, as plain data.

    document  what docs/capacity.md describes, with `measured` as a mapping (the command line reads it from a file)
    months    how many after now; before the file's own number, which is 6 when absent

    outcome is `answered` or `cannot_be_met`; the latter has `reasons` and no rows. Raises BadInput.
    """
    given = Fields(document, "", ("traffic", "measured", "targets", "hosts", "months", "shape_tolerance", "costs"))
    said = Said()
    traffic = read_traffic(given.must("traffic"))
    measured = read_measured(given.must("measured"), said)
    targets = read_targets(given.get("targets"))
    if months is None:
        months = given.whole("months", 0, MONTHS) if given.get("months") is not None else 6
    elif not 0 <= months <= MONTHS:
        raise BadInput("months", f"{months} is outside from 0 to {MONTHS}")
    per_host = None
    if given.get("hosts") is not None:
        per_host = Fields(given.get("hosts"), "hosts", ("gpus_per_host",)).whole("gpus_per_host", 1, 1024)
    if targets.redundancy == "host" and per_host is None:
        raise BadInput("hosts.gpus_per_host", "missing; targets.redundancy: host has to know how many GPUs one takes")
    prices = read_prices(given.get("costs")) if given.get("costs") is not None else None
    if prices and per_host is None:
        raise BadInput("hosts.gpus_per_host", "missing; hosts are paid for whole")
    tolerance = _tolerance(given.get("shape_tolerance"))
    _check_shape(traffic, measured, tolerance, said)

    one = replica(traffic, measured, targets)
    _assume(traffic, measured, targets, per_host, said)
    result: Dict[str, Any] = {
        "outcome": "answered" if one else "cannot_be_met",
        "reasons": [] if one else _unmet(measured, targets),
        "measured": {
            **measured.about,
            "gpus_per_replica": measured.gpus_per_replica,
            "prompt_tokens": asdict(measured.prompt),
            "output_tokens": asdict(measured.output),
            "points": len(measured.points),
        },
        "replica": None,
        "months": [],
        "costs": None,
        "warnings": said.warnings,
        "assumptions": said.assumptions,
    }
    if one is None:
        return result
    _tell_range(one, measured, said)
    fleet = Fleet(
        one.requests_per_second * (1 - targets.head_room_share), measured.gpus_per_replica, per_host, targets.redundancy
    )
    result["replica"] = {
        "requests_per_second": one.requests_per_second,
        "requests_per_second_with_head_room": fleet.per_replica,
        "at": asdict(one.point),
        "interpolated_between_concurrencies": list(one.between) if one.between else None,
        "by": dict(one.rates),
        "latency_limit": [LIMITS[key] for key in one.limited_by],
    }
    result["months"] = [row(traffic, month, fleet, one) for month in range(months + 1)]
    if prices:
        result["costs"] = _costs(Costs(traffic, fleet, prices), result["months"], said)
    return result


def _tolerance(value: Any) -> Tuple[float, float]:
    given = Fields({} if value is None else value, "shape_tolerance", ("tell_ratio", "refuse_ratio"))
    tell = given.optional("tell_ratio", TELL, least=1.0, most=1000.0)
    return tell, given.optional("refuse_ratio", max(tell, REFUSE), least=tell, most=1000.0)


def _check_shape(traffic: Traffic, measured: Measured, tolerance: Tuple[float, float], said: Said) -> None:
    """Whether the measured points say anything about requests of this length."""
    tell, refuse = tolerance
    said.assumptions.append(
        f"mean lengths up to {tell:g} times the measured ones hold, up to {refuse:g} times with a warning, beyond not"
    )
    for key, wanted, known in (
        ("prompt_tokens", traffic.prompt, measured.prompt),
        ("output_tokens", traffic.output, measured.output),
    ):
        where, ratio = f"traffic.{key}.mean", wanted.mean / known.mean
        text = f"{wanted.mean:g} tokens, measured with {known.mean:g} ({ratio:.2f} times)"
        if ratio > refuse:
            raise BadInput(
                where,
                f"{text}: more than {refuse:g} times; latency at that length was not measured. "
                "Measure with the lengths of the traffic",
            )
        if ratio > tell:
            said.warn(where, f"{text}: latency was measured with shorter ones and will be higher")
        elif ratio < 1 / tell:
            said.warn(where, f"{text}: no more requests per second are counted than were measured, so fewer may do")
        if wanted.p95 is None:
            continue
        if wanted.p95 < wanted.mean:
            said.warn(f"traffic.{key}.p95", f"{wanted.p95:g} is below the mean of {wanted.mean:g}")
        base, name = (known.p95, "p95") if known.p95 is not None else (known.mean, "mean (its p95 is not told)")
        if wanted.p95 > tell * base:
            said.warn(
                f"traffic.{key}.p95",
                f"{wanted.p95:g} tokens, {wanted.p95 / base:.2f} times the measured {name} of {base:g}: "
                "the slowest requests will be slower than measured",
            )
    if measured.max_model_len is None:
        return
    prompt = max(traffic.prompt.p95 or 0.0, traffic.prompt.mean)
    if prompt + traffic.output.mean > measured.max_model_len:
        raise BadInput(
            f"traffic.prompt_tokens.{'p95' if traffic.prompt.p95 else 'mean'}",
            f"{prompt:g} tokens and an answer of {traffic.output.mean:g} are more than the measured service's "
            f"max_model_len of {measured.max_model_len}; it would refuse or cut them",
        )


def _assume(traffic: Traffic, measured: Measured, targets: Targets, per_host: Optional[int], said: Said) -> None:
    """Say what is taken for granted, whatever the answer."""
    head = targets.head_room_share
    said.assumptions += [
        f"traffic grows by {traffic.growth_percent_per_month:g}% a month, compound; lengths and cached share stay",
        "the peak is spread evenly over the replicas",
        f"{traffic.cached_share:g} of the prompt tokens come out of the prefix cache "
        f"({measured.cached_share:g} did when measured) and cost no prefill",
        f"{head:g} of every replica's measured capacity is left free at peak (head room)",
        {
            "none": "no redundancy: a lost replica is missing at peak",
            "replica": "redundancy: the traffic is carried, with head room, when any one replica is lost",
            "host": "redundancy: the traffic is carried, with head room, when any one host is lost",
        }[targets.redundancy],
    ]
    if per_host is not None:
        said.assumptions.append(
            f"a host has {per_host} GPUs, a replica takes {measured.gpus_per_replica}"
            + ("" if measured.gpus_per_replica > per_host else " of one host")
        )
    if targets.ttft_p95_ms is None and targets.itl_p95_ms is None:
        said.warn("targets", "no latency is asked for: throughput alone decides, whatever users wait")
    if len(measured.points) < 3:
        said.warn("measured.points", f"{len(measured.points)} measured: a knee cannot be seen with fewer than 3")


def _tell_range(one: Replica, measured: Measured, said: Said) -> None:
    """Say where the numbers end."""
    last = measured.points[-1]
    if one.between is None and one.point == last:
        said.warn(
            "measured.points",
            f"the highest measured load (concurrency {last.concurrency:g}, {last.requests_per_second:g} requests per "
            "second) keeps the targets; what one replica does beyond it is not known, more replicas are counted",
        )
    if one.between is None:
        said.assumptions.append(f"one replica is counted as measured at concurrency {one.point.concurrency:g}")
    else:
        said.assumptions.append(
            f"one replica is counted at concurrency {one.point.concurrency:.4g}, on the straight line between the "
            f"points measured at {one.between[0]:g} and {one.between[1]:g}"
        )


def _costs(costs: Costs, rows: List[Dict[str, Any]], said: Said) -> Dict[str, Any]:
    """Both bills month by month (added to `rows`), and where they are equal."""
    prices, traffic = costs.prices, costs.traffic
    for month in rows:
        api, fleet = costs.api_month(month["requests_per_second"]), costs.fleet_month(month["requests_per_second"])
        cheaper = "equal" if abs(api - fleet) < 0.005 else "api" if api < fleet else "fleet"
        month.update(api_per_month=round(api, 2), fleet_per_month=round(fleet, 2), cheaper=cheaper)
    first, lasting, why = costs.break_even()
    said.assumptions += [
        f"prices are the user's own, in {prices.currency}: API {prices.input:g} a million input tokens, "
        f"{prices.cached:g} a million cached ones, {prices.output:g} a million output tokens; "
        f"host {prices.host_per_month:g} a month",
        f"{prices.added_share:g} of a host's price is added for electricity and administration",
        f"a month has {prices.hours_per_month:g} hours; hosts are paid for all of them, whole hosts only",
        f"the average over the month is {prices.average_to_peak:g} of the peak; the API is paid for the average",
        f"the API counts tokens as the model's own tokenizer does and finds the same cached share "
        f"({traffic.cached_share:g})",
        "prices, and what the API's latency and limits are, stay as they are now",
    ]
    return {
        "currency": prices.currency,
        "api_per_month_per_request_per_second_at_peak": costs.per_request_per_second,
        "host_per_month": costs.host,
        "break_even_requests_per_second": first,
        "break_even_cost_per_month": None if first is None else round(costs.api_month(first), 2),
        "fleet_never_dearer_from_requests_per_second": lasting,
        "no_break_even": why,
        "break_even_month": costs.month(),
        "months_searched": MONTHS,
    }
