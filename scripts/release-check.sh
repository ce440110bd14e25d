#!/usr/bin/env bash
# Builds HEAD's release twice, in two clones that lie in different places, and compares
# every byte of what came out. `make release-check` calls it; it takes two links and
# compressions of each architecture, and needs what scripts/release.sh needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
first=$work/a second=$work/another/folder/with-a-longer-name
for clone in "$first" "$second"; do
  git clone --quiet --no-hardlinks . "$clone"
  # Tags decide the version, and so does nothing else.
  RELEASE_KEY_FILE=${RELEASE_KEY_FILE:-} OUT=$clone/dist "$clone/scripts/release.sh" >/dev/null
  # As another person would build it, at another time.
  umask 077
done
if ! diff -r "$first/dist" "$second/dist"; then
  echo "release-check: the two builds differ" >&2
  exit 1
fi
find "$first/dist" -type f -printf '%P\n' | wc -l | xargs printf 'release-check: %s files, byte for byte the same\n'
if [ -n "${KEEP:-}" ]; then
  rm -rf "$KEEP"
  cp -a "$first/dist" "$KEEP"
fi
