#!/usr/bin/env bash
# Builds a release, signed with a key that is made for it and thrown away, and runs
# test/release over it. RELEASE=DIR looks at one that is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

release=${RELEASE:-}
if [ -z "$release" ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$work/key.pem" 2>/dev/null
  release=$(RELEASE_KEY_FILE=$work/key.pem OUT=$work/dist scripts/release.sh)
fi
LLMBOX_RELEASE=$release go test -count=1 -v -timeout 30m "$@" ./test/release
