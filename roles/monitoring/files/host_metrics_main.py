"""Starts the program that writes a host's numbers for the node exporter; installed by the Ansible role gpu_fleet.vllm.monitoring."""

import sys

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.host_metrics import main

sys.exit(main(sys.argv[1:]))
