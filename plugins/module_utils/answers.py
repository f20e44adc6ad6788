# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The same questions to a server before and after a change: are the answers alike, and how fast do they come?

Greedy answers (temperature 0) of two releases or settings differ in a token here and there, because sums are added up in another
order; nonsense differs from its beginning. So answers count as alike when their beginnings are the same, and a share of them
has to be.

Pure but for the requests, which `probe.request` makes. Standard library, Python 3.9 and newer.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from . import probe

# Short, of several kinds, and with one likely continuation each.
PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7,",
    "Monday, Tuesday, Wednesday,",
    "Water freezes at a temperature of",
    "def add(a, b):\n    return",
    "The opposite of hot is",
    "Once upon a time, there was a",
    '{"name": "Alice", "age":',
)
TOKENS = 24  # of each answer
AT_ONCE = 4  # requests in flight
BEGINNING = 12  # characters that two answers have to share to count as alike
NOISE = 1.0  # seconds that all answers may take longer before anybody calls it slow

Ask = Callable[[str], probe.Answer]


def ask(url: str, key: Optional[str], model: str, deadline: float) -> Dict[str, Any]:
    """All prompts, after one that warms up: answers (text a prompt), tokens, seconds, tokens_per_second, problem ('' when none).

    deadline   seconds for each answer
    """

    def one(prompt: str) -> probe.Answer:
        payload = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        return probe.request(f"{url}/v1/completions", key, payload, deadline)

    return measured(one)


def measured(one: Ask, clock: Callable[[], float] = time.monotonic) -> Dict[str, Any]:
    """As `ask`, over any way of asking one prompt."""
    nothing: Dict[str, Any] = {"answers": [], "tokens": 0, "seconds": 0.0, "tokens_per_second": 0.0}
    warm = one(PROMPTS[0])
    if not warm.right:
        return {**nothing, "problem": warm.problem}
    began = clock()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        came = list(pool.map(one, PROMPTS))
    seconds = max(clock() - began, 1e-6)
    wrong = [answer.problem for answer in came if not answer.right]
    if wrong:
        return {**nothing, "problem": wrong[0]}
    try:
        texts = [answer.body["choices"][0]["text"] for answer in came]
        tokens = sum(answer.body["usage"]["completion_tokens"] for answer in came)
    except (KeyError, IndexError, TypeError) as error:
        return {**nothing, "problem": f"an answer without {error}"}
    return {
        "answers": texts,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2),
        "problem": "",
    }


def alike(before: Sequence[str], after: Sequence[str]) -> List[bool]:
    """Prompt by prompt, whether the beginnings are the same."""
    return [text[:BEGINNING] == after[number][:BEGINNING] for number, text in enumerate(before)]


def faults(before: Mapping[str, Any], after: Mapping[str, Any], same: float, speed: float) -> List[str]:
    """What speaks against the change, one sentence each; empty when nothing does.

    same    share of prompts (0 to 1) whose answers have to begin alike
    speed   tokens per second that are needed, as a share of those before
    """
    if after["problem"]:
        return [f"it does not answer: {after['problem']}"]
    found = []
    equal = alike(before["answers"], after["answers"])
    if sum(equal) < same * len(equal):
        first = equal.index(False)
        found.append(
            f"{sum(equal)} of {len(equal)} answers begin as before, wanted {same:.0%} (vllm_service_compare_same); to "
            f"{PROMPTS[first]!r} it was {before['answers'][first][:60]!r} and is {after['answers'][first][:60]!r}"
        )
    slow = after["tokens_per_second"] < speed * before["tokens_per_second"]
    if slow and after["seconds"] > before["seconds"] + NOISE:
        found.append(
            f"{after['tokens_per_second']:g} tokens/s, it was {before['tokens_per_second']:g}, wanted {speed:.0%} of that "
            "(vllm_service_compare_speed)"
        )
    return found
