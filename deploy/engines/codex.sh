#!/usr/bin/env bash
# The Codex CLI for tests, as published: codex.sh [VERSION...] prints the path of each version's binary.
# It is static and needs no Node; only npm, which fetches its package and checks it, does.
set -euo pipefail
# shellcheck source=deploy/engines/state.sh
. "$(dirname "$0")/state.sh"

FOLDER="$CACHE/codex"
[ "$#" -gt 0 ] || set -- 0.144.4 0.171.0

platform() {
  case "$(uname -s)-$(uname -m)" in
    Linux-x86_64) echo linux-x64 ;;
    Linux-aarch64) echo linux-arm64 ;;
    *) fail "there is no static Codex CLI for $(uname -s) on $(uname -m)." ;;
  esac
}

install_version() {
  local version="$1" platform work
  platform="$(platform)"
  install_missing npm=npm
  mkdir -p "$FOLDER"
  work="$(mktemp -d "$FOLDER/.new-XXXXXX")"
  # shellcheck disable=SC2064 # the folder of this very run
  trap "rm -rf '$work'" EXIT
  say "fetches @openai/codex $version for $platform (about 150 MB)"
  (cd "$work" && npm pack --silent "@openai/codex@$version-$platform" >/dev/null) ||
    fail "npm could not fetch @openai/codex@$version-$platform: is there such a version, and does npm reach a registry?"
  mkdir "$work/unpacked"
  # The files lie under package/vendor/TARGET/: bin/codex, the programs that it calls, and libraries for voice.
  tar -xzf "$work"/*.tgz -C "$work/unpacked" --strip-components=3 --no-same-owner --wildcards 'package/vendor/*'
  "$work/unpacked/bin/codex" --version >/dev/null || fail "the binary of @openai/codex $version does not run here."
  rm -rf "${FOLDER:?}/$version"
  mv "$work/unpacked" "$FOLDER/$version"
  rm -rf "$work"
}

for version; do
  [[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "'$version' is no exact version, such as 0.144.4."
  [ -x "$FOLDER/$version/bin/codex" ] || install_version "$version"
  printf '%s\n' "$FOLDER/$version/bin/codex"
done
