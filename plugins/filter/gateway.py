"""Filters of role gateway: see plugins/module_utils/gateway.py."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

api_tls = Module("api_tls")
gateway = Module("gateway")


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
            "gateway_backends": gateway.function("backends"),
            "gateway_servers_of": lambda instance, plan: gateway.servers_of(plan, instance),
            "gateway_servers_of_replica": gateway.function("servers_of"),
            "certificate_name": api_tls.function("name"),
            "gateway_spoken": gateway.function("spoken"),
            "gateway_replicas_on": gateway.function("replicas_on"),
            "gateway_models": gateway.function("models"),
            "gateway_interface": gateway.function("interface"),
            "gateway_externals": gateway.function("externals"),
            "gateway_aliases": gateway.function("aliases"),
            "gateway_model_list": gateway.function("model_list"),
            "gateway_key_map": lambda entries, limits: gateway.map_text(gateway.keys(entries, limits)),
            "gateway_grant_map": lambda entries: gateway.map_text(gateway.grants(entries)),
            "gateway_map": gateway.function("map_text"),
        }
