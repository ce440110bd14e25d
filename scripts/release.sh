#!/usr/bin/env bash
# Builds a release into a folder that can be put on a server as it is; `make release` calls
# it, docs/release.md describes it. The same commit, the same Go and the same gcc give the
# same bytes in any directory.
#
#   VERSION             version, with or without v (default: from git)
#   OUT                 folder (default: dist)
#   RELEASE_URL         https address the folder will lie under: filled into the scripts
#   RELEASE_KEY_FILE    PEM file with the private key (ECDSA, P-256); without it nothing is signed
#   RELEASE_PUBLIC_KEY  PEM file with its public half, where the key itself is elsewhere
#   SOURCE_DATE_EPOCH   time of everything packed (default: of the commit)
set -euo pipefail
umask 022
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export LC_ALL=C TZ=UTC CGO_ENABLED=0 GOWORK=off GOFLAGS='-trimpath -buildvcs=false'
# Whatever the shell has set for other builds would be in the binary.
unset GOEXPERIMENT GOAMD64 GOARM64 GODEBUG CGO_LDFLAGS

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'release: %s\n' "$*" >&2; exit 1; }

version=${VERSION:-$(git describe --tags --match 'v*' --dirty 2>/dev/null || true)}
version=${version:-0.0.0-dev-$(git describe --always --dirty --exclude '*')}
stamp=$version
version=${version#v}
[[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$ ]] || die "VERSION is $version: it must be like 1.2.3 or 1.2.3-rc.1"
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
out=${OUT:-dist}
dir=$out/v$version
key=${RELEASE_KEY_FILE:-}
public_key=${RELEASE_PUBLIC_KEY:-}
[ -z "$key" ] || [ -r "$key" ] || die "RELEASE_KEY_FILE can't be read: $key"
[ -z "$public_key" ] || [ -r "$public_key" ] || die "RELEASE_PUBLIC_KEY can't be read: $public_key"
case "$version" in *-dirty) say "the tree has changes that are in no commit: this is no release to hand out" ;; esac

# The child that asks NVML needs a C compiler of either architecture.
declare -A cc=([amd64]=x86_64-linux-gnu-gcc [arm64]=aarch64-linux-gnu-gcc)
for arch in amd64 arm64; do
  command -v "${cc[$arch]}" >/dev/null || die "${cc[$arch]} is missing (Debian: gcc, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross)"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$dir"
mkdir -p "$dir"

say "tools"
(cd tools/release && go build -ldflags '-s -w' -o "$work/release" .)
(cd tools/man && go build -ldflags '-s -w' -o "$work/man" .)
release=$work/release

for arch in amd64 arm64; do
  say "llmbox $version for linux/$arch"
  CGO_ENABLED=1 GOARCH=$arch CC=${cc[$arch]} CGO_CFLAGS='-O2 -g -Wno-deprecated-declarations' \
    go build -ldflags '-s -w' -o "embed/nvml/$arch/llmbox-nvml" ./cmd/llmbox-nvml
  GOARCH=$arch go build -buildvcs=true -ldflags "-s -w -X main.version=$stamp" -o "$dir/llmbox-linux-$arch" ./cmd/llmbox
done

say "what it is made of"
host=$(go env GOHOSTARCH)
# Of a box as it comes, whatever this machine has in /etc/llmbox.
printf 'apiVersion: llmbox.dev/v1alpha1\nkind: Box\n' >"$work/box.yaml"
env -i PATH="$PATH" "$dir/llmbox-linux-$host" images --gpu h100 --config "$work/box.yaml" --output json >"$work/images.json"
"$release" papers -root . -dir "$dir" -version "$version" -time "$SOURCE_DATE_EPOCH" -images "$work/images.json"

say "packages"
"$work/man" -version "$version" -time "$SOURCE_DATE_EPOCH" -out "$work/files"
gzip -9n "$work"/files/man/*.1
cp packaging/copyright "$dir/THIRD-PARTY-LICENCES.txt" "$work/files/"
for arch in amd64 arm64; do
  cp "$dir/llmbox-linux-$arch" "$work/files/llmbox"
  "$release" packages -version "$version" -arch "$arch" -files "$work/files" -time "$SOURCE_DATE_EPOCH" -out "$dir" >/dev/null
done

say "scripts"
if [ -n "$key" ]; then
  "$release" public -key "$key" >"$work/public.pem"
  [ -z "$public_key" ] || cmp -s "$work/public.pem" "$public_key" || die "RELEASE_PUBLIC_KEY is not the public half of RELEASE_KEY_FILE"
  public_key=$work/public.pem
fi
fill=("$release" fill -url "${RELEASE_URL:-}" -key "$public_key")
for script in install.sh brev.sh cloud-init.yaml; do
  "${fill[@]}" -version "v$version" "scripts/$script" "$dir/$script"
done
# What is not in a version's folder always leads to the newest.
"${fill[@]}" scripts/install.sh "$out/install.sh"
[ -z "$public_key" ] || cp "$public_key" "$out/llmbox.pub"

say "checksums"
(cd "$dir" && sha256sum -- * >"$work/SHA256SUMS")
mv "$work/SHA256SUMS" "$dir/SHA256SUMS"
chmod 644 "$dir/SHA256SUMS"
if [ -n "$key" ]; then
  "$release" sign -key "$key" "$dir/SHA256SUMS"
  "$release" verify -key "$public_key" "$dir/SHA256SUMS"
  say "signed"
else
  say "not signed: RELEASE_KEY_FILE is not set"
fi
# A release candidate or a development build is never what a newcomer gets.
case "$version" in
  *-*) ;;
  *) printf 'v%s\n' "$version" >"$out/latest" ;;
esac
find "$out" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
(cd "$dir" && ls -l) >&2
printf '%s\n' "$dir"
