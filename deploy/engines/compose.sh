#!/usr/bin/env bash
# Docker Compose v2 and buildx as plug-ins of the docker command, from Debian's packages.
# Debian has them from trixie on; an older Debian takes the two files from there and installs nothing.
set -euo pipefail
# shellcheck source=deploy/engines/state.sh
. "$(dirname "$0")/state.sh"

RELEASE=trixie
PLUGINS="$DOCKER_CONFIG/cli-plugins"
WORK="$CACHE/compose-packages"
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

present() { [ -x "$PLUGINS/docker-compose" ] && [ -x "$PLUGINS/docker-buildx" ]; }

if present; then
  say "Compose and buildx are there already: $PLUGINS"
  exit 0
fi

archive="$(debian_archive)"
# apt keeps this second set of lists in a folder of its own: the machine's stays as it is.
mkdir -p "$WORK"/{state/lists/partial,cache/archives/partial,sources,unpacked} "$PLUGINS"
printf 'deb [signed-by=%s] %s %s main\n' "$KEYRING" "$archive" "$RELEASE" >"$WORK/sources/release.list"
private=(-o "Dir::State=$WORK/state" -o "Dir::State::status=/dev/null" -o "Dir::Cache=$WORK/cache"
  -o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$WORK/sources" -o "APT::Sandbox::User=root")

say "takes docker-compose and docker-buildx from Debian $RELEASE"
apt-get "${private[@]}" update -qq
(cd "$WORK" && apt-get "${private[@]}" download -qq docker-compose docker-buildx)
for package in "$WORK"/docker-*.deb; do
  dpkg -x "$package" "$WORK/unpacked"
done
find "$WORK/unpacked" -path '*/cli-plugins/docker-*' -type f -exec install -m 755 -t "$PLUGINS" {} +
rm -rf "$WORK"
present || fail "Debian's packages held no cli-plugins/docker-compose and docker-buildx."
say "installed into $PLUGINS"
