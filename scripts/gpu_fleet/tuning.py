"""Tuning that is proved: a small, named set of settings is tried on one replica under load, and what came of each is told.

Each candidate takes the way of every change (playbooks/deploy.yml on the replica's hosts: written beside, checked by the release's own
parser, proved by a probe, back by itself where it does not start) and is measured by playbooks/accept.yml. playbooks/tune.yml notes
before what the replica serves with and takes it out of service at the gateways, and in the end brings just that back. The note lies
beside the inventory until then: whatever a run was cut short by, the next one begins by bringing the replica back. What is better is
offered, never kept.

Pure but for `play`, which runs a playbook (gpu_fleet.api.play).
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AS_IT_IS, ONE_GPU = "as it is", "one GPU"
# Seconds that a change and its measurement may take before the first one was timed.
GUESS = 240.0
UTILIZATION_STEP, UTILIZATION_MOST = 0.03, 0.95
# Seconds of load: playbooks/accept.yml's own default, and the least that says anything; of a candidate's part of the budget this share
# is load, the rest is its start.
MOST_LOAD, LEAST_LOAD, LOAD_SHARE = 360.0, 60.0, 0.6
# None of what is tried is taken away meanwhile, so that what served before is there to go back to.
KEEP_GENERATIONS = 1000


class Refused(ValueError):
    """What cannot be tuned; the message says why and what to do. Nothing was changed."""


class Interrupted(Exception):
    """It was told to end; the replica serves as before."""


class NotBack(RuntimeError):
    """The replica does not serve as before; the message says what to do."""


@dataclass(frozen=True)
class Candidate:
    """Settings to try, in place of the service's own, and what is hoped of them.

    args     options of `vllm serve`; None takes one away
    service  keys of the service in vllm_services, while it is tried
    copies   of such replicas that fit where there is one now: its throughput counts so many times
    copy     keys of the service to write into the inventory besides args
    """

    name: str
    args: Mapping[str, Any]
    why: str
    service: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1
    copy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """What to copy into the service's entry of vllm_services."""
        return {**self.copy, "args": dict(self.args)}


@dataclass
class Trial:
    """What came of a candidate. document is None where it could not be measured; problem says why."""

    candidate: Candidate
    document: dict[str, Any] | None = None
    problem: str = ""
    seconds: float = 0.0
    verdict: str = ""  # against the settings as they are: better, worse, same, unknown
    change: float | None = None

    @property
    def throughput(self) -> dict[str, Any] | None:
        """Output tokens per second at the load up to the knee that brings most of them: median, low, high, repeats, concurrency."""
        if self.document is None or self.document["knee"]["concurrency"] is None:
            return None
        name, knee = "output_tokens_per_second", self.document["knee"]["concurrency"]
        inside = [one for one in self.document["points"] if one["concurrency"] <= knee and name in one["median"]]
        if not inside:
            return None
        most = max(inside, key=lambda one: one["median"][name])
        rates = {side: most[side][name] * self.candidate.copies for side in ("median", "low", "high")}
        return {**rates, "repeats": most["repeats"], "concurrency": most["concurrency"], "knee": knee}

    @property
    def why_not(self) -> str:
        """Why there is no throughput to compare, or ''."""
        if self.problem or self.document is None or self.throughput is not None:
            return self.problem
        knee, points = self.document["knee"], self.document["points"]
        seen = ", ".join(
            f"{name} {points[0]['median'][name]:,.0f}" for name in knee["limited_by"] if name in points[0]["median"]
        )
        least = f" ({seen} at concurrency {points[0]['concurrency']:g})" if seen else ""
        return (
            f"no load kept the objective, so that nothing can be compared{least}; accept_objective says what is asked"
        )

    def told(self) -> dict[str, Any]:
        """For a file, or for machines."""
        one = self.candidate
        return {
            "name": one.name,
            "settings": one.settings,
            "why": one.why,
            "output_tokens_per_second": self.throughput,
            "against_as_it_is": self.verdict,
            "change": None if self.change is None else round(self.change, 4),
            "problem": self.why_not,
            "seconds": round(self.seconds, 1),
        }


def candidates(config: Mapping[str, Any], of: Mapping[str, Any], only: Sequence[str] = ()) -> list[Candidate]:
    """What is tried, the settings as they are first. only: names of candidates; default: all of them.

    config   what `vllm serve` is given now
    of       the replica, as the plan has it: accelerator, gpus, hosts, tensor, pipeline, data

    Options are those of vllm/engine/arg_utils.py; n-gram speculation is the method of vllm/config/speculative.py that needs no
    second model.
    """
    found = [*_batches(config), *_memory(config, of), *_tensor(of)]
    off = "no-enable-prefix-caching"
    if config.get(off):
        found.append(Candidate("prefix-caching", {off: None}, "prompts that begin alike are read once"))
    else:
        found.append(Candidate("prefix-caching", {off: True}, "nothing is looked up where no prompts begin alike"))
    if not config.get("speculative-config"):
        ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
        why = "answers that repeat their prompts come sooner"
        found.append(Candidate("speculative-ngram", {"speculative-config": ngram}, why))
    known = list(dict.fromkeys(one.name for one in found))
    for name in only:
        if name not in known:
            raise Refused(f"there is no candidate {name}; there are {', '.join(known)}. Nothing was changed")
    return [Candidate(AS_IT_IS, {}, "what is compared with"), *(one for one in found if not only or one.name in only)]


def _batches(config: Mapping[str, Any]) -> list[Candidate]:
    seats = int(config.get("max-num-seqs") or 256)
    more, fewer = "more at once: throughput, if requests have to wait", "fewer at once: less time between tokens"
    found = [Candidate("max-num-seqs", {"max-num-seqs": seats * 2}, more)]
    if seats > 1:
        found.append(Candidate("max-num-seqs", {"max-num-seqs": seats // 2}, fewer))
    for tokens, why in (
        (2048, "small steps: less time between tokens"),
        (8192, "large steps: prompts are read sooner"),
    ):
        if config.get("max-num-batched-tokens") != tokens and tokens >= seats:
            found.append(Candidate("max-num-batched-tokens", {"max-num-batched-tokens": tokens}, why))
    return found


def _memory(config: Mapping[str, Any], of: Mapping[str, Any]) -> list[Candidate]:
    """Where nothing is said it is vLLM's own 0.9 or 0.92 (data/memory.yml), so that the most is above it, too."""
    share = config.get("gpu-memory-utilization")
    more = UTILIZATION_MOST if share is None else round(share + UTILIZATION_STEP, 2)
    if of["accelerator"] == "cpu" or more > UTILIZATION_MOST:
        return []
    return [Candidate("gpu-memory-utilization", {"gpu-memory-utilization": more}, "a larger KV cache")]


def _tensor(of: Mapping[str, Any]) -> list[Candidate]:
    """Two replicas of half the tensor-parallel size on the same GPUs: one of them is measured, alone, and counted twice."""
    gpus, tensor = list(of.get("gpus") or []), of.get("tensor") or 1
    alone = len(of["hosts"]) == 1 and len(gpus) == tensor
    if not alone or tensor < 2 or tensor % 2 or (of.get("pipeline") or 1) > 1 or (of.get("data") or 1) > 1:
        return []
    return [
        Candidate(
            "tensor-parallel-size",
            {"tensor-parallel-size": tensor // 2},
            "two replicas that exchange nothing; one was measured, alone, and counted twice",
            service={"gpus": gpus[: tensor // 2], "replicas_per_host": 1},
            copies=2,
            copy={"replicas_per_host": 2},
        )
    ]


SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "enable-expert-parallel")


def one_gpu(of: Mapping[str, Any]) -> Candidate:
    """The same with one GPU of it: what the verdict on scaling compares with. Raises Refused."""
    gpus, hosts = list(of.get("gpus") or []), list(of.get("ray_hosts") or of["hosts"])
    if len(gpus) * len(hosts) < 2:
        raise Refused("the replica has one GPU, or none: nothing scales. Nothing was changed")
    if len(hosts) > 1:
        raise Refused(
            f"the replica is {', '.join(hosts)} together, and cannot be cut down to one GPU in its place. Nothing was changed. "
            "Serve the model with one GPU as a service of its own, with the same model and release, and measure that"
        )
    less = {"gpus": gpus[:1], "replicas_per_host": 1}
    return Candidate(ONE_GPU, dict.fromkeys(SIZES), "what the verdict on scaling compares with", service=less)


def label(candidate: Candidate) -> str:
    def one(name: str, value: Any) -> str:
        if value is None:
            return f"without {name}"
        return f"{name} {json.dumps(value) if isinstance(value, Mapping) else value}"

    if candidate.name == ONE_GPU:
        return ONE_GPU
    words = [*(one(*item) for item in candidate.copy.items()), *(one(*item) for item in candidate.args.items())]
    return ", ".join(words) or AS_IT_IS


def replica_of(plan: Mapping[str, Any], service: str) -> str:
    """The replica that is tried on: the service's last one. Raises Refused."""
    if service not in plan["services"]:
        raise Refused(f"there is no service {service}; there are {', '.join(plan['services'])}. Nothing was changed")
    own = plan["services"][service]["replicas"]
    hosts = set(plan["replicas"][own[-1]]["hosts"])
    beside = [one for one in own[:-1] if hosts & set(plan["replicas"][one]["hosts"])]
    if beside:
        raise Refused(
            f"{own[-1]} shares {', '.join(sorted(hosts))} with {', '.join(beside)} of the same service, which would be changed, too. "
            "Nothing was changed"
        )
    return own[-1]


def changed(services: Any, service: str, candidate: Candidate) -> list[dict[str, Any]]:
    """vllm_services with a candidate's settings for one of them. Raises Refused."""
    if not isinstance(services, list):
        raise Refused(
            "vllm_services is no list in the inventory but made by a template, so that none can be tried in its place. Nothing was changed"
        )
    found = copy.deepcopy(services)
    for one in found:
        if isinstance(one, dict) and one.get("name") == service:
            args = {**(one.get("args") or {}), **candidate.args}
            one |= {**candidate.service, "args": {name: value for name, value in args.items() if value is not None}}
            return found
    raise Refused(f"vllm_services of the inventory names no {service} as it is written. Nothing was changed")


def judge(trials: Sequence[Trial], compare: Callable[..., Mapping[str, Any]]) -> Trial | None:
    """Each trial against the first one; the best of those that are better beyond the noise, or None."""
    base = trials[0].throughput
    best: Trial | None = None
    for trial in trials[1:]:
        seen = trial.throughput
        if base is None or seen is None:
            trial.verdict = "unknown"
            continue
        sides = [
            {
                **{side: {"output_tokens_per_second": one[side]} for side in ("median", "low", "high")},
                "repeats": one["repeats"],
            }
            for one in (base, seen)
        ]
        row = compare(*sides, "output_tokens_per_second", True)
        trial.verdict = {"faster": "better", "slower": "worse"}.get(row["verdict"], row["verdict"])
        trial.change = row["change"]
        if trial.verdict == "better" and (best is None or seen["median"] > best.throughput["median"]):  # type: ignore[index]
            best = trial
    return best


@dataclass
class Tuning:
    """One tuning of a replica. play(playbook, limit, variables, check) gives a FleetResult.

    note         file of the controller that says what is to be brought back, while there is something
    allow        vllm_service_allow_outage of the inventory: whether users may be without a server
    load_budget  seconds of load for each candidate; None: what the inventory says
    keep         folder of the controller where the runs are kept; None: nowhere
    """

    play: Callable[..., Any]
    plan: Mapping[str, Any]
    services: Any
    service: str
    gateways: bool
    allow: bool
    note: Path
    budget: float
    load_budget: float | None = None
    keep: Path | None = None
    measure: Mapping[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    said: Callable[[str], None] = lambda _line: None

    def run(self, tried: Sequence[Candidate]) -> list[Trial]:
        """Try them in turn within the budget; whatever happens, the replica serves in the end as it did."""
        began = self.clock()
        self.bring_back()
        replica = replica_of(self.plan, self.service)
        for candidate in tried:
            changed(self.services, self.service, candidate)
        self._refuse_outage(replica)
        of = self.plan["replicas"][replica]
        limit = ",".join(of.get("ray_hosts") or of["hosts"])
        self._want_settled(limit)
        trials: list[Trial] = []
        try:
            self._must(self._tune("noted", tune_replica=replica))
            longest = GUESS
            for candidate in tried:
                if trials and self.clock() - began + longest > self.budget:
                    trials.append(Trial(candidate, problem="not tried: the budget was used up"))
                    continue
                self.said(f"trying {label(candidate)}")
                at = self.clock()
                trial = self._one(candidate, replica, limit)
                trial.seconds = self.clock() - at
                longest = max(trial.seconds, longest if not trials else 0.0)
                trials.append(trial)
        finally:
            self.bring_back()
        return trials

    def bring_back(self) -> bool:
        """Have the replica serve as it was noted, if there is a note; whether there was one. Raises NotBack."""
        if not self.note.is_file():
            return False
        self.said(f"bringing {self.service} back to what it served with")
        result = self._tune("back")
        if result.exit_status:
            raise NotBack(
                f"{self.service} was not brought back: {_first(result)}. scripts/fleet tune -i INVENTORY {self.service} --put-back tries again"
            )
        return True

    def _tune(self, state: str, **more: Any) -> Any:
        told = {"tune_service": self.service, "tune_state": state, "tune_note": str(self.note.resolve()), **more}
        return self.play("tune", None, told, False)

    def _refuse_outage(self, replica: str) -> None:
        """Nobody waits for a replica that is tried on, unless it was allowed."""
        others = len(self.plan["services"][self.service]["replicas"]) > 1
        if self.allow or (others and self.gateways):
            return
        why = f"no other replica of {self.service}" if not others else "no gateway that could take it out of service"
        raise Refused(
            f"{replica} is started anew for each setting, and there is {why}, so its users would wait. Nothing was changed. "
            "-e vllm_service_allow_outage=true allows it"
        )

    def _want_settled(self, limit: str) -> None:
        """A run with another setting brings everything that the inventory says, so that nothing else may be due."""
        result = self._go("deploy", limit, {}, True)
        if result.exit_status:
            raise Refused(f"it cannot be changed as it is: {_first(result)}. Nothing was changed")
        due = {host: names for host, names in result.differing.items() if names}
        if due:
            told = "; ".join(f"{host}: {', '.join(names[:5])}" for host, names in due.items())
            raise Refused(
                f"the fleet is not as the inventory says ({told}), and would become so on the way. Nothing was changed. Run scripts/fleet deploy first"
            )

    def _go(self, playbook: str, limit: str | None, variables: Mapping[str, Any], check: bool = False) -> Any:
        result = self.play(playbook, limit, variables, check)
        if result.interrupted:
            raise Interrupted
        return result

    def _must(self, result: Any) -> None:
        if result.interrupted:
            raise Interrupted
        if result.exit_status:
            raise Refused(_first(result))

    def _one(self, candidate: Candidate, replica: str, limit: str) -> Trial:
        settings: dict[str, Any] = {}
        if candidate.args:
            settings = {"vllm_services": changed(self.services, self.service, candidate)}
            more = {
                "vllm_service_allow_outage": True,
                "vllm_service_keep_generations": KEEP_GENERATIONS,
                # How fast it is, is measured here, and against the settings as they are; what it answers is held to as ever.
                "vllm_service_compare_speed": 0,
            }
            result = self._go("deploy", limit, {**settings, **more})
            if result.exit_status:
                return Trial(candidate, problem=f"does not serve: {_first(result)}")
        with tempfile.TemporaryDirectory(prefix="gpu_fleet-tune-") as temporary:
            folder = self.keep or Path(temporary)
            before = set(folder.glob(f"{self.service}/*Z.json"))
            variables = {**self.measure, "accept_replica": replica, "accept_folder": str(folder), "accept_full": False}
            if self.load_budget:
                variables["accept_budget"] = self.load_budget
            result = self._go("accept", None, {**variables, **settings})
            runs = sorted(set(folder.glob(f"{self.service}/*Z.json")) - before)
            if not runs:
                return Trial(candidate, problem=f"was not measured: {_first(result)}")
            return Trial(candidate, json.loads(runs[-1].read_text(encoding="utf-8")))


def load_budget(budget: float, count: int) -> float:
    """Seconds of load that each of so many candidates may have."""
    return max(LEAST_LOAD, min(MOST_LOAD, budget / max(count, 1) * LOAD_SHARE))


def _first(result: Any) -> str:
    if result.failures:
        return str(result.failures[0].message).rstrip(".")
    return f"not reached: {', '.join(result.unreachable)}" if result.unreachable else "it says why above"


def lines(trials: Sequence[Trial], best: Trial | None, service: str) -> list[str]:
    """For people: a line a trial, and the offer."""
    found = []
    for trial in trials:
        seen = trial.throughput
        if seen is None:
            found.append(f"{label(trial.candidate)}: {trial.why_not}")
            continue
        against = "" if trial.change is None else f"; {trial.change:+.0%}, {trial.verdict}"
        found.append(
            f"{label(trial.candidate)}: {seen['median']:,.1f} output tokens/s ({seen['low']:,.1f}-{seen['high']:,.1f}, "
            f"{seen['repeats']} repeats) at concurrency {seen['concurrency']:g}, knee {seen['knee']:g}{against}"
        )
    if best is None and trials and trials[0].throughput is None:
        found.append("There is nothing to compare with. It serves as before.")
    elif best is None:
        found.append("Nothing was better beyond the noise. It serves as before.")
    else:
        found.append(
            f"Best: {label(best.candidate)} ({best.candidate.why}). It serves as before; to have it, write "
            f"{json.dumps(best.candidate.settings)} into {service} in vllm_services and run scripts/fleet deploy."
        )
    return found


def kept(trials: Sequence[Trial], best: Trial | None, *, service: str, replica: str, when: str) -> dict[str, Any]:
    """What is kept beside the inventory: settings to copy, and the numbers that speak for them."""
    document = next((trial.document for trial in trials if trial.document), None)
    settings = document["settings"] if document else {}
    return {
        "service": service,
        "replica": replica,
        "date": when,
        "release": document["versions"]["vllm"] if document else None,
        "load": {name: settings.get(name) for name in ("dataset", "input_tokens", "output_tokens", "prompts_digest")},
        "objective": document["objective"] if document else None,
        "best": best.candidate.name if best else None,
        "settings": best.candidate.settings if best else {},
        "trials": [trial.told() for trial in trials],
    }
