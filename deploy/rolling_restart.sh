#!/usr/bin/env bash
# Replaces every container of the named services by a new one, with the image and configuration of now, and loses no
# request: one more is started, and when it is ready an old one is stopped, until no old one is left.
#   deploy/rolling_restart.sh [SERVICE...]     environment, agent, model-proxy, resources; all four when none is named
set -euo pipefail
cd "$(dirname "$0")/.."

READY_S=120

fail() { printf 'rolling_restart.sh: %s\n' "$*" >&2; exit 1; }

replace_all() {
  local service="$1" running container old
  running="$(docker compose ps --quiet "$service")"
  [ -n "$running" ] || fail "no container of '$service' runs: start the mesh with 'docker compose up --wait'."
  mapfile -t old <<<"$running"
  for container in "${old[@]}"; do
    docker compose up --detach --wait --wait-timeout "$READY_S" --no-deps --no-recreate \
      --scale "$service=$((${#old[@]} + 1))" "$service"
    # TERM: it says at once that it is not ready, goes on serving until the balancer has noticed, and ends what is open.
    docker stop "$container" >/dev/null
    docker rm "$container" >/dev/null
  done
}

[ "$#" -gt 0 ] || set -- environment agent model-proxy resources
for service; do
  case "$service" in
    environment | agent | model-proxy | resources) replace_all "$service" ;;
    *) fail "'$service' cannot be replaced one by one; environment, agent, model-proxy and resources can." ;;
  esac
done
