#!/usr/bin/env bash
# HAProxy for tests, from Debian's package.
set -euo pipefail
# shellcheck source=deploy/engines/state.sh
. "$(dirname "$0")/state.sh"

install_server haproxy haproxy
