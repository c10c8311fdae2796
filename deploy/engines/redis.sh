#!/usr/bin/env bash
# The Redis server for tests, from Debian's package. The tests start their own, on free ports; the package's service
# does not start.
set -euo pipefail
# shellcheck source=deploy/engines/state.sh
. "$(dirname "$0")/state.sh"

if command -v redis-server >/dev/null; then
  say "redis-server is there already: $(redis-server --version)"
  exit 0
fi
# Where systemd runs, a package's service starts at once and at every boot, unless told otherwise.
systemd=""
if command -v systemctl >/dev/null && [ -d /run/systemd/system ]; then
  systemd=yes
  systemctl mask --runtime --quiet redis-server.service
fi
install_packages redis-server
if [ -n "$systemd" ]; then
  systemctl unmask --runtime --quiet redis-server.service
  systemctl disable --quiet redis-server.service
fi
say "installed: $(redis-server --version)"
