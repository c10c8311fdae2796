# shellcheck shell=bash disable=SC2016,SC2034 # $(REPO_URI) is apt's; the variables are for the sourcing script
# Sourced by the scripts in this folder: where they keep things, and how they install Debian packages.
# PADDOCK_CACHE may name another folder; all of it can be deleted when no engine runs.

CACHE="${PADDOCK_CACHE:-${HOME:-/root}/.cache/paddock}"
ENGINE="$CACHE/docker"
BASE_IMAGE="paddock/base:bookworm"
export DOCKER_CONFIG="$CACHE/docker-config"

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
fail() { say "$*"; exit 1; }

# install_missing PACKAGE=COMMAND...: those packages whose command is missing.
install_missing() {
  local pair missing=()
  for pair in "$@"; do
    command -v "${pair#*=}" >/dev/null || missing+=("${pair%%=*}")
  done
  [ "${#missing[@]}" = 0 ] || install_packages "${missing[@]}"
}

install_packages() {
  command -v apt-get >/dev/null || fail "needs $*, and this machine has no apt-get: install them by hand."
  [ "$(id -u)" = 0 ] || fail "needs $*: run it as root, or 'apt-get install $*' first."
  say "installs $*"
  refresh_lists
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "$@" >/dev/null
}

# install_server COMMAND PACKAGE: without its service, which a package starts at once and at every boot where systemd
# runs. Tests start their own, on free ports.
install_server() {
  local command="$1" package="$2" systemd=""
  if command -v "$command" >/dev/null; then
    say "$command is there already: $("$command" -v | head -n 1)"
    return
  fi
  if command -v systemctl >/dev/null && [ -d /run/systemd/system ]; then
    systemd=yes
    systemctl mask --runtime --quiet "$package.service"
  fi
  install_packages "$package"
  if [ -n "$systemd" ]; then
    systemctl unmask --runtime --quiet "$package.service"
    systemctl disable --quiet "$package.service"
  fi
  say "installed: $("$command" -v | head -n 1)"
}

refresh_lists() {
  [ -z "${PADDOCK_LISTS_FRESH:-}" ] || return 0
  apt-get update -qq >/dev/null
  PADDOCK_LISTS_FRESH=yes
}

# The address of Debian's own archive as this machine is set up to reach it: another release lies there too.
debian_archive() {
  local archive
  archive="$(listed_archive)"
  if [ -z "$archive" ]; then
    refresh_lists
    archive="$(listed_archive)"
  fi
  [ -n "$archive" ] || fail "found no Debian archive among apt's sources."
  printf '%s\n' "$archive"
}

listed_archive() {
  local own
  own="$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)"
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' "Codename: $own" | head -n 1
}
