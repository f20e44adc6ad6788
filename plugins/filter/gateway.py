"""Filters of role gateway: see plugins/module_utils/gateway.py."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gateway

DOCUMENTATION = r"""
name: gateway
short_description: What the gateways are made of
description: Backends, routes, keys and grants from the plan and the keys of clients.
author: The gpu_fleet authors
options:
  _input: {description: The plan, or the keys of clients., type: raw, required: true}
"""


class FilterModule:
    def filters(self):
        return {
            "gateway_backends": gateway.backends,
            "gateway_servers_of": lambda instance, plan: gateway.servers_of(plan, instance),
            "gateway_servers_of_replica": gateway.servers_of,
            "gateway_replicas_on": gateway.replicas_on,
            "gateway_models": gateway.models,
            "gateway_interface": gateway.interface,
            "gateway_externals": gateway.externals,
            "gateway_aliases": gateway.aliases,
            "gateway_model_list": gateway.model_list,
            "gateway_key_map": lambda entries, limits: gateway.map_text(gateway.keys(entries, limits)),
            "gateway_grant_map": lambda entries: gateway.map_text(gateway.grants(entries)),
            "gateway_map": gateway.map_text,
        }
