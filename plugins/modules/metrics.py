#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Ask a Prometheus, or pages of metrics, from the host that may."""

from __future__ import annotations

DOCUMENTATION = r"""
module: metrics
short_description: Ask a Prometheus, or pages of metrics, from the host that may ask
version_added: 0.1.0
description:
  - Metrics are open to monitors and to the host itself alone; this asks there and brings the answers. Proxies are not used. What does
    not answer is told in RV(problems), and no failure.
author: The gpu_fleet authors (@gpu-fleet)
options:
  prometheus: {description: Base URL of a Prometheus., type: str}
  queries: {description: What it is asked, name to expression., type: dict, default: {}}
  pages:
    description:
      - Pages in the text format, name to URL. Each is read twice. One called C(vllm INSTANCE) is a server of this host, asked by TLS or in
        clear as what runs there is spoken to.
    type: dict
    default: {}
  between: {description: Seconds between the two readings., type: float, default: 2}
  deadline: {description: Seconds for each answer., type: float, default: 10}
attributes:
  check_mode: {support: full, description: Only asks.}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Ask how many replicas answer
  gpu_fleet.vllm.metrics:
    prometheus: http://127.0.0.1:9090
    queries: {right: "gpu_fleet:service_replicas_right"}
"""

RETURN = r"""
answers: {description: By query the result of /api/v1/query., type: dict, returned: success}
alerts: {description: The list of /api/v1/alerts., type: list, elements: dict, returned: success}
pages: {description: "By page C(first), C(second) and the C(seconds) between.", type: dict, returned: success}
problems: {description: What did not answer., type: dict, returned: success}
"""

import json
import time
import urllib.error
import urllib.parse

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import api_tls, probe

MOST = 16 << 20


def spoken(name, url):
    """A server's page is asked as what runs there is spoken to; its name is `vllm INSTANCE`."""
    kind, _, instance = name.partition(" ")
    return api_tls.url(url, f"/etc/vllm/{instance}/current") if kind == "vllm" else url


def fetch(url, deadline):
    with probe.opener(url).open(url, timeout=deadline) as answer:
        return answer.read(MOST).decode("utf-8", "replace")


def main():
    module = AnsibleModule(
        argument_spec={
            "prometheus": {"type": "str"},
            "queries": {"type": "dict", "default": {}},
            "pages": {"type": "dict", "default": {}},
            "between": {"type": "float", "default": 2},
            "deadline": {"type": "float", "default": 10},
        },
        supports_check_mode=True,
    )
    p = module.params
    told = {"answers": {}, "alerts": [], "pages": {}, "problems": {}}

    def trying(name, url):
        try:
            return fetch(url, p["deadline"])
        except (OSError, ValueError) as error:
            told["problems"][name] = f"{url}: {error}"
            return None

    if p["prometheus"]:
        base = p["prometheus"].rstrip("/")
        for name, expression in p["queries"].items():
            text = trying(name, f"{base}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
            if text is None:
                continue
            told["answers"][name] = json.loads(text)["data"]["result"]
        text = trying("alerts", f"{base}/api/v1/alerts")
        told["alerts"] = json.loads(text)["data"]["alerts"] if text else []
    began = {}
    pages = {name: spoken(name, url) for name, url in p["pages"].items()}
    for name, url in pages.items():
        text = trying(name, url)
        if text is not None:
            began[name] = (time.monotonic(), text)
    if began:
        time.sleep(p["between"])
    for name, (at, first) in began.items():
        second = trying(name, pages[name])
        if second is not None:
            told["pages"][name] = {"first": first, "second": second, "seconds": time.monotonic() - at}
    module.exit_json(changed=False, **told)


if __name__ == "__main__":
    main()
