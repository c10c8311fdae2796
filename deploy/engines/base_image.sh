#!/usr/bin/env bash
# Makes the image paddock/base:bookworm (Debian, Python 3.11, CA certificates) without an image registry.
# The unpacked system is kept as a tar in PADDOCK_CACHE; a running engine with the image needs nothing more.
set -euo pipefail
# shellcheck source=deploy/engines/state.sh
. "$(dirname "$0")/state.sh"

RELEASE=bookworm
PACKAGES=python3,python3-venv,ca-certificates
TAR="$CACHE/base-$RELEASE-$(dpkg --print-architecture).tar"

make_tar() {
  install_missing debootstrap=debootstrap
  local archive root
  archive="$(debian_archive)"
  root="$(mktemp -d "$CACHE/base-XXXXXX")"
  # shellcheck disable=SC2064 # the folder of this very run
  trap "rm -rf --one-file-system '$root'" EXIT
  say "unpacks Debian $RELEASE with debootstrap (about 40 s)"
  if ! debootstrap --variant=minbase --include="$PACKAGES" "$RELEASE" "$root" "$archive" >"$CACHE/debootstrap.log" 2>&1; then
    tail -n 20 "$CACHE/debootstrap.log" >&2
    fail "debootstrap failed; the end of its log stands above."
  fi
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
  tar -C "$root" --one-file-system -cf "$TAR.part" .
  mv "$TAR.part" "$TAR"
}

[ "$(id -u)" = 0 ] || fail "debootstrap needs root."
mkdir -p "$CACHE"
if docker image inspect "$BASE_IMAGE" >/dev/null 2>&1; then
  say "$BASE_IMAGE is there already"
  exit 0
fi
[ -f "$TAR" ] || make_tar
docker import --change 'CMD ["bash"]' "$TAR" "$BASE_IMAGE" >/dev/null
say "imported $BASE_IMAGE"
