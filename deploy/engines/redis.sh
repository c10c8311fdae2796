#!/usr/bin/env bash
# The Redis server for tests, from Debian's package.
set -euo pipefail
# shellcheck source=deploy/engines/state.sh
. "$(dirname "$0")/state.sh"

install_server redis-server redis-server
