"""NCCL's interface and the kernel's range of ports, after hands were at both."""

from __future__ import annotations

BIND = (
    "import socket\n"
    "held = [socket.socket() for _ in range(300)]\n"
    "for s in held: s.bind(('', 0)); s.listen()\n"
    "ports = [s.getsockname()[1] for s in held]\n"
    "print(min(ports), max(ports), 50051 in ports)\n"
)


def lines(host, path):
    return [line for line in host.file(path).content_string.splitlines() if line and not line.startswith("#")]


def test_a_socket_without_a_port_gets_one_of_the_range(host):
    """What NCCL does; the file and the kernel's variable alone would prove nothing."""
    low, high, reserved = host.check_output("python3 -c %s", BIND).split()
    assert int(low) >= 40000
    assert int(high) <= 60999
    assert reserved == "False"


def test_the_next_boot_gives_the_same_range(host):
    host.run_expect([0], "/lib/systemd/systemd-sysctl")
    assert host.check_output("cat /proc/sys/net/ipv4/ip_local_port_range").split() == ["40000", "60999"]
    assert host.check_output("cat /proc/sys/net/ipv4/ip_local_reserved_ports") == "50051"


def test_the_file_names_exactly_the_interface_of_the_fleets_address(host, host_name):
    said = lines(host, "/etc/nccl.conf")
    assert said[:3] == ["NCCL_SOCKET_IFNAME==host0", "NCCL_SOCKET_FAMILY=AF_INET", "NCCL_DEBUG=WARN"]
    # The lab's hosts have one interface beside lo, and it carries the address by which the peer is known.
    peer = {"gpu-01": "gpu-02", "gpu-02": "gpu-01"}[host_name]
    assert " dev host0 " in host.check_output(f"ip route get $(getent ahostsv4 {peer} | cut -d' ' -f1)")


def test_lines_of_others_are_left_as_they_were(host, host_name):
    text = host.file("/etc/nccl.conf").content_string
    theirs = "# tuned by hand\nNCCL_IB_HCA==mlx5_0:1\nNCCL_PORT_RANGE=10000-10005\n"
    assert text.endswith(theirs) if host_name == "gpu-02" else "NCCL_IB_HCA" not in text


def test_no_quotes_no_spaces_as_nccl_reads_it(host):
    for line in lines(host, "/etc/nccl.conf"):
        name, _, value = line.partition("=")
        assert name == name.strip()
        assert value == value.strip("\"' ")
