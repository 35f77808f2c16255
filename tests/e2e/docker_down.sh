#!/usr/bin/env bash
# Stops the engine that docker_up.sh started, by the engine's own pid file, and undoes what it did to the network.
pid=$(cat /var/run/docker.pid 2>/dev/null) || exit 0
kill -TERM "$pid"
for _ in $(seq 80); do kill -0 "$pid" 2>/dev/null || break; sleep 0.25; done
ip link del docker0 2>/dev/null
# The engine sets FORWARD to DROP and fills these tables; on a test machine nobody else does.
iptables -P FORWARD ACCEPT; iptables -F; iptables -X; iptables -t nat -F; iptables -t nat -X
sysctl -qw net.ipv4.ip_forward=0
exit 0
