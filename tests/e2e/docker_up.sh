#!/usr/bin/env bash
# Brings up a Docker engine on a bare Debian test machine (root), for the tests marked `containers`:
#   docker_up.sh STATE_DIR [BASE_IMAGE]
# Where no registry can be reached, the base image that the Dockerfile starts from is made of Debian packages, with this
# machine's certificates and pip settings, so that pip works inside as it does here. Idempotent; undo with docker_down.sh.
set -euo pipefail
state=$1
base=${2:-python:3.11-slim}
mkdir -p "$state"

need=()
command -v dockerd >/dev/null || need+=(docker.io)
command -v docker-compose >/dev/null || docker compose version >/dev/null 2>&1 || need+=(docker-compose)
command -v iptables >/dev/null || need+=(iptables)
command -v debootstrap >/dev/null || need+=(debootstrap)
if ((${#need[@]})); then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >"$state/apt.log" 2>&1
fi

if ! docker info >/dev/null 2>&1; then
  setsid nohup dockerd >"$state/dockerd.log" 2>&1 &
  for _ in $(seq 300); do docker info >/dev/null 2>&1 && break; sleep 0.1; done
fi
docker info -f 'docker {{.ServerVersion}}, {{.Driver}}'

if ! docker image inspect "$base" >/dev/null 2>&1 && ! timeout 60 docker pull -q "$base" >/dev/null 2>&1; then
  root=$state/rootfs
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | head -n 1)
  if ! [ -x "$root/usr/bin/python3" ]; then
    debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates bookworm "$root" "$mirror" \
      >"$state/debootstrap.log" 2>&1
  fi
  ln -sf python3 "$root/usr/bin/python"
  rm -rf "$root"/usr/lib/python3.11/EXTERNALLY-MANAGED "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*_*
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$root/etc/pip.conf"
  for name in index-url extra-index-url trusted-host proxy; do
    value=$(python3 -m pip config get "global.$name" 2>/dev/null) && printf '%s = %s\n' "$name" "$value" >>"$root/etc/pip.conf"
  done
  tar -C "$root" -c --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' . |
    docker import -c 'CMD ["python3"]' -c 'ENV LANG=C.UTF-8' -c 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' \
      - "$base" >/dev/null
fi
docker image inspect -f 'base image {{index .RepoTags 0}} ready' "$base"
