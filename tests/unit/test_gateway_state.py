"""What HAProxy knows of its servers, kept over a reload with which one of them moved."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gateway_state

# As HAProxy 2.6.12 printed it.
STATE = """1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight srv_time_since_last_change \
srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state bk_f_forced_id srv_f_forced_id srv_fqdn srv_port \
srvrecord srv_use_ssl srv_check_port srv_check_addr srv_agent_addr srv_agent_port
5 chat 1 chat.0 10.213.167.11 2 0 1 1 637 15 3 2 6 0 0 0 - 8000 - -1 8003 - - 8003
6 talk 1 talk.0 10.213.167.11 2 8 1 1 72 15 3 2 6 0 0 0 - 8100 - -1 8103 - - 8103

"""
SERVERS = """
global
    server-state-file /var/lib/gpu-fleet-gateway/servers

backend chat
    # server chat.0 198.51.100.1:1 is a comment
    server chat.0 10.213.167.11:8000 verifyhost gpu-01.vllm check no-check-ssl port 8003 maxconn 256

backend talk
    server talk.0 {place} verifyhost gpu-02.vllm no-ssl check no-check-ssl port 8303 maxconn 256

frontend chat
    server chat.0 192.0.2.1:1 check port 2
"""


@pytest.mark.parametrize("place", ["10.213.167.12:8300", "[fd00::12]:8300"])
def test_a_server_that_moved_is_asked_at_its_new_ports_and_stays_drained(place):
    told = gateway_state.fitted(STATE, SERVERS.format(place=place))
    moved = "6 talk 1 talk.0 10.213.167.11 2 8 1 1 72 15 3 2 6 0 0 0 - 8300 - -1 8303 - - 8303"
    assert told.splitlines() == [*STATE.splitlines()[:3], moved, ""]


def test_where_no_server_moved_the_state_is_the_same():
    same = SERVERS.format(place="10.213.167.11:8100").replace("8303", "8103")
    assert gateway_state.fitted(STATE, same) == STATE


def test_a_server_without_a_port_for_its_check_has_its_own():
    row = STATE.replace("6 talk 1 talk.0", "6 bought 1 bought").replace("8103 - - 8103", "0 - - 0")
    bought = "backend bought\n    server bought api.example.org:8443 ssl check check-sni api.example.org inter 10s\n"
    assert gateway_state.fitted(row, bought) == row.replace("8100", "8443")


def test_what_is_kept_is_made_to_fit_in_its_place(tmp_path):
    file, configuration = tmp_path / "servers", tmp_path / "haproxy.cfg"
    configuration.write_text(SERVERS.format(place="10.213.167.12:8300"))
    gateway_state.fit(str(file), str(configuration))
    assert not file.exists()
    file.write_text(STATE)
    gateway_state.fit(str(file), str(configuration))
    assert " 8300 " in file.read_text() and " 8100 " not in file.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".new")] == []
