"""Real hosts on one machine: systemd-nspawn on a bridge, one overlay a host, SSH with a throw-away key.

names     what a lab is called, everywhere it leaves a trace
state     what is written down about a lab, and the locks
machine   what this machine is told about mirrors, proxies and certificates, for the hosts to inherit
base      the root file system all hosts of one Debian release share, made once
network   bridge, addresses, NAT, and the counter of what left the lab
cgroups   a control group tree for each host
hosts     one host: overlay, files, process, SSH
labs      a whole lab: up, down
cli       the command line
"""
