#!/usr/bin/env bash
# A private Docker engine for tests: docker.sh start | stop | status | env
# It has its own data, socket and pid file under PADDOCK_CACHE, and touches no other engine.
set -euo pipefail
# shellcheck source=deploy/engines/state.sh
. "$(dirname "$0")/state.sh"

SOCKET="$ENGINE/docker.sock"
PID_FILE="$ENGINE/dockerd.pid"
LOG="$ENGINE/dockerd.log"
READY_TRIES=120
STOP_TRIES=60

engine_pid() {
  local pid
  pid="$(cat "$PID_FILE" 2>/dev/null)" || return 1
  [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] || return 1
  printf '%s\n' "$pid"
}

# Two engines would share the bridge docker0 and the packet filter's chains.
other_engine() {
  local comm
  for comm in /proc/[0-9]*/comm; do
    if [ "$(cat "$comm" 2>/dev/null)" = dockerd ]; then
      basename "$(dirname "$comm")"
      return
    fi
  done
  return 1
}

answers() { DOCKER_HOST="unix://$SOCKET" timeout 10 docker info >/dev/null 2>&1; }

start() {
  if engine_pid >/dev/null && answers; then
    say "the engine runs already, pid $(engine_pid)"
    return
  fi
  local other
  if other="$(other_engine)"; then
    fail "another Docker engine runs already, pid $other: use that one, or stop it first."
  fi
  install_missing docker.io=dockerd iptables=iptables
  mkdir -p "$ENGINE" "$DOCKER_CONFIG"
  rm -f "$PID_FILE" "$SOCKET"
  say "starts dockerd; its log is $LOG"
  setsid dockerd --data-root "$ENGINE/data" --exec-root "$ENGINE/exec" --pidfile "$PID_FILE" \
    --host "unix://$SOCKET" >"$LOG" 2>&1 </dev/null &
  local started=$!
  for _ in $(seq "$READY_TRIES"); do
    if answers; then
      say "ready, pid $(engine_pid)"
      clear_away
      return
    fi
    kill -0 "$started" 2>/dev/null || break
    sleep 0.5
  done
  tail -n 20 "$LOG" >&2
  kill "$started" 2>/dev/null || true
  fail "dockerd did not become ready; the end of its log stands above."
}

# A run that was killed leaves containers that would start again with the engine. Images and build cache stay.
clear_away() {
  export DOCKER_HOST="unix://$SOCKET"
  docker ps --all --quiet | xargs --no-run-if-empty docker rm --force >/dev/null
  docker volume ls --quiet | xargs --no-run-if-empty docker volume rm >/dev/null
  docker network prune --force >/dev/null
  docker image prune --force >/dev/null
}

stop() {
  local pid
  if ! pid="$(engine_pid)"; then
    say "no engine of ours runs"
    return
  fi
  kill "$pid"
  for _ in $(seq "$STOP_TRIES"); do
    if ! kill -0 "$pid" 2>/dev/null; then
      say "stopped, pid $pid"
      return
    fi
    sleep 0.5
  done
  kill -KILL "$pid" 2>/dev/null || true
  fail "dockerd (pid $pid) ignored TERM for $((STOP_TRIES / 2)) s and was killed; its containers may still run."
}

show_env() {
  printf 'export DOCKER_HOST=%q\n' "unix://$SOCKET"
  printf 'export DOCKER_CONFIG=%q\n' "$DOCKER_CONFIG"
  printf 'export PADDOCK_BASE_IMAGE=%q\n' "$BASE_IMAGE"
  local bundle="${PADDOCK_BUILD_CA:-/etc/ssl/certs/ca-certificates.crt}"
  if [ -f "$bundle" ]; then
    printf 'export PADDOCK_BUILD_CA=%q\n' "$bundle"
  fi
}

case "${1:-}" in
  start) start ;;
  stop) stop ;;
  status) engine_pid >/dev/null && answers ;;
  env) show_env ;;
  *) fail "say start, stop, status or env" ;;
esac
