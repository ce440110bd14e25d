#!/usr/bin/env bash
# Makes the clean root file systems that the install script and a newcomer's path are
# tried in, with debootstrap, each once; `make roots` calls it and is told their folder.
#
#   ROOTS           folder (default: llmbox-roots in the user's cache)
#   DEBIAN_ARCHIVE  address of Debian's packages (default: the one this machine has its
#                   own from, else debootstrap's)
set -euo pipefail
umask 022

roots=${ROOTS:-${XDG_CACHE_HOME:-$HOME/.cache}/llmbox-roots}
# shellcheck disable=SC2016 # for apt-get to fill in
archive=${DEBIAN_ARCHIVE:-$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null | awk '$1 == "Debian" { print $2; exit }')}
if [ "$(id -u)" != 0 ]; then
  echo "debian-roots: debootstrap needs root" >&2
  exit 1
fi

# make_root NAME SUITE PACKAGES [FLAGS]: one that was cut off is left under no name.
make_root() {
  local name=$1 suite=$2 packages=$3 making
  shift 3
  [ ! -d "$roots/$name" ] || return 0
  mkdir -p "$roots"
  making=$(mktemp -d "$roots/.making-XXXXXX")
  echo "== $name" >&2
  if ! debootstrap --variant=minbase --include="$packages" "$@" "$suite" "$making" ${archive:+"$archive"} >"$making.log" 2>&1; then
    tail -n 20 "$making.log" >&2
    rm -rf "$making" "$making.log"
    return 1
  fi
  # As in Ubuntu since 25.10: the programs written in Rust have the names of the others.
  if [ -d "$making/usr/lib/cargo/bin/coreutils" ]; then
    for program in "$making"/usr/lib/cargo/bin/coreutils/*; do
      ln -sf "../lib/cargo/bin/coreutils/${program##*/}" "$making/usr/bin/${program##*/}"
    done
    ln -sf sudo-rs "$making/usr/bin/sudo"
  fi
  rm -rf "$making/var/cache/apt" "$making/var/lib/apt/lists" "$making.log"
  chmod 755 "$making"
  mv "$making" "$roots/$name"
}

# What cloud images have, and busybox.
has=ca-certificates,curl,wget,sudo,busybox,openssl,systemd,systemd-sysv,dbus
make_root debian-12 bookworm "$has"
make_root debian-13 trixie "$has"
make_root ubuntu-like trixie "$has,sudo-rs,rust-coreutils"
# /bin and /usr/bin are two directories.
make_root split-usr bullseye "$has" --no-merged-usr
# What README names to build and to rehearse, but for Go.
make_root newcomer bookworm ca-certificates,git,make,sudo
printf '%s\n' "$roots"
