#!/bin/sh
# llmbox's install script: fetches one binary, verifies it, and runs `llmbox install`.
#
#   curl -fsSL "$LLMBOX_URL/install.sh" | sh
#   curl -fsSL "$LLMBOX_URL/install.sh" | sh -s -- --model Qwen/Qwen3-8B
#   curl -fsSL "$LLMBOX_URL/install.sh" | sh -s -- --download-only
#
# POSIX sh. Nothing here works before the last line was read: half a script, from a
# connection that broke, defines functions and ends. `sh install.sh --help` lists the
# variables; docs/install-script.md says why each is there.

usage() {
    cat <<'HELP'
install.sh [--download-only] [--help] [flags of llmbox install]

Fetches llmbox, verifies it and runs: llmbox install --fix FLAGS </dev/null

  --download-only   put the binary in place and stop
  --help            this text; llmbox install --help lists the flags

Variables:
  INSTALL_LLMBOX_URL                https address of the releases
  INSTALL_LLMBOX_VERSION            version to install, such as v1.2.3 (default: the channel's)
  INSTALL_LLMBOX_CHANNEL            file under the address that names a version (default: latest)
  INSTALL_LLMBOX_ARTIFACT_DIR       directory with a release: nothing is downloaded
  INSTALL_LLMBOX_BIN_DIR            where the binary goes (default: /usr/local/bin, else /opt/bin)
  INSTALL_LLMBOX_EXEC               more flags for llmbox install, split at blanks
  INSTALL_LLMBOX_SKIP_DOWNLOAD      true: use the binary that is in place
  INSTALL_LLMBOX_SKIP_START         true: as --download-only
  INSTALL_LLMBOX_SKIP_FIX           true: don't mend the machine (no --fix)
  INSTALL_LLMBOX_PUBLIC_KEY         PEM file with the key that signs releases
  INSTALL_LLMBOX_REQUIRE_SIGNATURE  true: stop where the signature can't be checked
  INSTALL_LLMBOX_SKIP_VERIFY        true: install without a checksum (don't)
  INSTALL_LLMBOX_CA_FILE            PEM file of certificate authorities to trust
  INSTALL_LLMBOX_RETRIES            tries for each download (default: 5)
  INSTALL_LLMBOX_STALL_SECONDS      give a try up after this long without progress (default: 30)
  INSTALL_LLMBOX_TMPDIR             where to download to (default: TMPDIR, /tmp, /var/tmp)
  https_proxy, no_proxy             as curl and wget read them

Ends with llmbox's own code; before that: 1 something failed, 2 bad usage.
HELP
}

say() { printf 'llmbox: %s\n' "$*" >&2; }

# die CODE WHAT FIX
die() {
    printf 'llmbox: %s\n' "$2" >&2
    [ -z "${3:-}" ] || printf '  fix: %s\n' "$3" >&2
    exit "$1"
}

have() { command -v "$1" >/dev/null 2>&1; }

is_true() {
    case "$1" in
        true | TRUE | True | 1 | yes) return 0 ;;
        '' | false | FALSE | False | 0 | no) return 1 ;;
    esac
    die 2 "$2 is \"$1\": it must be true or false"
}

settle() {
    # What a release fills in. Empty in the source: the project owns no host.
    release_url=''
    release_version=''
    release_key=''

    base=${INSTALL_LLMBOX_URL:-$release_url}
    base=${base%/}
    version=${INSTALL_LLMBOX_VERSION:-$release_version}
    channel=${INSTALL_LLMBOX_CHANNEL:-latest}
    artifacts=${INSTALL_LLMBOX_ARTIFACT_DIR:-}
    bin_dir=${INSTALL_LLMBOX_BIN_DIR:-}
    retries=${INSTALL_LLMBOX_RETRIES:-5}
    stall=${INSTALL_LLMBOX_STALL_SECONDS:-30}
    ca_file=${INSTALL_LLMBOX_CA_FILE:-}
    key_file=${INSTALL_LLMBOX_PUBLIC_KEY:-}
    fix=true download=true verify=true signed=false
    ! is_true "${INSTALL_LLMBOX_SKIP_START:-}" INSTALL_LLMBOX_SKIP_START || start=false
    ! is_true "${INSTALL_LLMBOX_SKIP_FIX:-}" INSTALL_LLMBOX_SKIP_FIX || fix=false
    ! is_true "${INSTALL_LLMBOX_SKIP_DOWNLOAD:-}" INSTALL_LLMBOX_SKIP_DOWNLOAD || download=false
    ! is_true "${INSTALL_LLMBOX_SKIP_VERIFY:-}" INSTALL_LLMBOX_SKIP_VERIFY || verify=false
    ! is_true "${INSTALL_LLMBOX_REQUIRE_SIGNATURE:-}" INSTALL_LLMBOX_REQUIRE_SIGNATURE || signed=true

    for number in "$retries" "$stall"; do
        case "$number" in
            '' | *[!0-9]* | 0*) die 2 "\"$number\" is no number of tries or seconds" "INSTALL_LLMBOX_RETRIES and INSTALL_LLMBOX_STALL_SECONDS are whole numbers from 1" ;;
        esac
    done
    check_name "$channel" INSTALL_LLMBOX_CHANNEL
    if [ -n "$version" ]; then
        check_name "$version" INSTALL_LLMBOX_VERSION
        version=v${version#v}
    fi
    for file in "$ca_file" "$key_file"; do
        [ -z "$file" ] || [ -r "$file" ] || die 2 "$file can't be read" "INSTALL_LLMBOX_CA_FILE and INSTALL_LLMBOX_PUBLIC_KEY name PEM files"
    done
    case "$bin_dir" in
        '' | /*) ;;
        *) die 2 "INSTALL_LLMBOX_BIN_DIR is \"$bin_dir\": it must be an absolute path" ;;
    esac
    [ "$download" = true ] || return 0
    if [ -n "$artifacts" ]; then
        [ -d "$artifacts" ] || die 2 "$artifacts is no directory" "INSTALL_LLMBOX_ARTIFACT_DIR names a directory with a release"
        return 0
    fi
    case "$base" in
        https://?*) ;;
        '') die 2 "no address of releases is known" "INSTALL_LLMBOX_URL=https://..., or INSTALL_LLMBOX_ARTIFACT_DIR=DIR" ;;
        *) die 2 "releases come over https only" "INSTALL_LLMBOX_URL=https://..." ;;
    esac
}

# A version and a channel become a part of an address and of a path.
check_name() {
    case "$1" in
        *[!A-Za-z0-9.+~_-]* | .* | '') die 2 "$2 is \"$1\": letters, digits and . + ~ _ - only" ;;
    esac
}

find_machine() {
    os=$(uname -s)
    [ "$os" = Linux ] || die 2 "this machine runs $os, a box needs Linux" "run this on the GPU machine"
    machine=$(uname -m)
    case "$machine" in
        x86_64 | amd64) arch=amd64 ;;
        aarch64 | arm64) arch=arm64 ;;
        *) die 2 "there is no llmbox for $machine: amd64 and arm64 only" ;;
    esac
    file=llmbox-linux-$arch
}

# find_root decides how root's work is done: as_root runs it.
find_root() {
    sudo=''
    [ "$(id -u)" != 0 ] || return 0
    have sudo || die 2 "this needs root, and sudo is not here" "log in as root, or --download-only with INSTALL_LLMBOX_BIN_DIR=DIR"
    sudo='sudo -n'
    ! sudo -n true </dev/null 2>/dev/null || return 0
    # Opened, not looked at: it may be there and have no terminal behind it.
    if (exec </dev/tty) 2>/dev/null; then
        sudo=sudo
        sudo -v </dev/null || die 1 "sudo didn't let you become root"
        return 0
    fi
    die 2 "sudo wants a password, and there is no terminal to ask on" "run this as root, or allow sudo without a password"
}

as_root() {
    # shellcheck disable=SC2086 # two words, or none
    $sudo "$@"
}

can_write() {
    # shellcheck disable=SC2016 # expanded by the shell that is started
    as_root mkdir -p "$1" 2>/dev/null && as_root sh -c ': >"$1" && rm -f "$1"' sh "$1/.llmbox.$$" 2>/dev/null
}

find_bin_dir() {
    if [ -n "$bin_dir" ]; then
        if [ "$start" = false ] && mkdir -p "$bin_dir" 2>/dev/null && [ -w "$bin_dir" ]; then
            sudo=''
        else
            find_root
        fi
        can_write "$bin_dir" || die 1 "$bin_dir can't be written to" "INSTALL_LLMBOX_BIN_DIR=DIR names another directory"
        return 0
    fi
    find_root
    for bin_dir in /usr/local/bin /opt/bin; do
        ! can_write "$bin_dir" || return 0
    done
    die 1 "neither /usr/local/bin nor /opt/bin can be written to" "INSTALL_LLMBOX_BIN_DIR=DIR names another directory"
}

find_loader() {
    if have curl; then
        loader=curl
    elif have wget && wget --version 2>/dev/null | grep -q 'GNU Wget'; then
        loader=wget
    elif have wget; then
        die 1 "this wget doesn't check whom it talks to" "install curl or GNU wget, or INSTALL_LLMBOX_ARTIFACT_DIR=DIR"
    else
        die 1 "neither curl nor wget is here" "install curl, or INSTALL_LLMBOX_ARTIFACT_DIR=DIR"
    fi
}

find_summer() {
    if have sha256sum; then
        summer='sha256sum'
    elif have shasum; then
        summer='shasum -a 256'
    elif have openssl; then
        summer='openssl dgst -sha256 -r'
    else
        summer=''
        [ "$verify" = false ] || die 1 "neither sha256sum, shasum nor openssl is here: the download can't be verified" "install coreutils"
    fi
}

sum_of() {
    # shellcheck disable=SC2086 # a command with its flags
    sum_line=$($summer <"$1") || die 1 "$1 can't be summed up"
    printf '%s\n' "${sum_line%% *}"
}

# Executables are never started from here, so noexec does no harm.
make_work_dir() {
    work=''
    for dir in "${INSTALL_LLMBOX_TMPDIR:-}" "${TMPDIR:-}" /tmp /var/tmp "$bin_dir"; do
        if [ ! -d "$dir" ] || [ ! -w "$dir" ]; then continue; fi
        free=$(df -Pk "$dir" 2>/dev/null | awk 'NR == 2 { print $4 }')
        [ "${free:-0}" -ge 122880 ] || continue
        work=$(mktemp -d "$dir/llmbox.XXXXXX" 2>/dev/null) && return 0
        work=''
    done
    die 1 "no directory for temporary files has 120 MiB free" "INSTALL_LLMBOX_TMPDIR=DIR names one"
}

clean_up() {
    [ -z "${work:-}" ] || rm -rf "$work"
    [ -z "${placed:-}" ] || as_root rm -f "$placed"
    work='' placed=''
}

# load URL FILE: one try; what is in FILE already is kept and gone on from.
load() {
    case "$loader" in
        curl)
            set -- "$@" -q -fsSL --proto '=https' --proto-redir '=https' --tlsv1.2 --connect-timeout "$stall" --speed-limit 1024 --speed-time "$stall"
            [ -z "$ca_file" ] || set -- "$@" --cacert "$ca_file"
            load_url=$1 load_to=$2
            shift 2
            curl "$@" -C - -o "$load_to" "$load_url"
            ;;
        wget)
            set -- "$@" -nv --tries=1 --timeout="$stall" --https-only --secure-protocol=TLSv1_2
            [ -z "$ca_file" ] || set -- "$@" --ca-certificate="$ca_file"
            load_url=$1 load_to=$2
            shift 2
            wget "$@" -c -O "$load_to" "$load_url"
            ;;
    esac
}

# fetch NAME FILE: NAME of the release at hand; false where that isn't there.
fetch() {
    if [ -n "$artifacts" ]; then
        [ -r "$artifacts/$1" ] || return 1
        cp "$artifacts/$1" "$2"
        return
    fi
    try=1
    while ! load "$base/$1" "$2" 2>"$work/error" </dev/null; do
        # Asked for what is not there, a server says so at once.
        ! grep -Eq ' (404|403|410)([^0-9]|$)' "$work/error" || return 1
        [ "$try" -lt "$retries" ] || return 1
        # A server that can't go on in the middle is asked from the start.
        ! grep -Eq 'range|416' "$work/error" || rm -f "$2"
        say "try $try of $retries for $1 ended: $(tr '\n' ' ' <"$work/error")"
        try=$((try + 1))
        sleep 1
    done
}

why() { tr '\n' ' ' <"$work/error" 2>/dev/null || :; }

find_version() {
    : >"$work/error"
    if [ -n "$artifacts" ]; then
        where=''
        return 0
    fi
    if [ -z "$version" ]; then
        fetch "$channel" "$work/version" || die 1 "$base/$channel didn't say which version is current: $(why)" "INSTALL_LLMBOX_VERSION=v1.2.3, or mend the way to it (https_proxy)"
        read -r version <"$work/version" || [ -n "$version" ] || die 1 "$base/$channel is empty"
        case "$version" in
            v[0-9]*) ;;
            *) die 1 "$base/$channel holds no version" "INSTALL_LLMBOX_VERSION=v1.2.3" ;;
        esac
        check_name "$version" "the version in $base/$channel"
    fi
    where=$version/
}

find_sum() {
    want=''
    if [ "$verify" = false ]; then
        say "INSTALL_LLMBOX_SKIP_VERIFY is set: what is installed is not verified"
        return 0
    fi
    fetch "${where}SHA256SUMS" "$work/SHA256SUMS" || die 1 "SHA256SUMS of this release could not be had, and nothing is installed unverified: $(why)" "check INSTALL_LLMBOX_VERSION and the way to it (https_proxy)"
    check_signature
    want=$(awk -v file="$file" '$2 == file || $2 == "*" file { print $1 }' "$work/SHA256SUMS")
    case "$want" in
        '') die 1 "this release has no $file" "take another version: INSTALL_LLMBOX_VERSION" ;;
        *[!0-9a-f]*) die 1 "SHA256SUMS of this release is damaged: it has no single checksum for $file" ;;
    esac
    [ "${#want}" = 64 ] || die 1 "SHA256SUMS of this release is damaged: the checksum for $file has ${#want} digits, not 64"
}

# The signature is over SHA256SUMS, as cosign sign-blob makes it with a key.
check_signature() {
    if [ -z "$key_file" ] && [ -n "$release_key" ]; then
        key_file=$work/key.pem
        printf '%s\n' "$release_key" >"$key_file"
    fi
    if [ -z "$key_file" ]; then
        [ "$signed" = false ] || die 1 "no key is known that signs releases" "INSTALL_LLMBOX_PUBLIC_KEY=FILE"
        return 0
    fi
    if have openssl && have base64; then
        verifier=openssl
    elif have cosign; then
        verifier=cosign
    else
        [ "$signed" = false ] || die 1 "neither openssl nor cosign is here: the signature can't be checked" "install openssl"
        say "the signature is not checked: neither openssl nor cosign is here"
        return 0
    fi
    fetch "${where}SHA256SUMS.sig" "$work/SHA256SUMS.sig" || die 1 "SHA256SUMS.sig of this release could not be had: $(why)"
    case "$verifier" in
        openssl)
            base64 -d <"$work/SHA256SUMS.sig" >"$work/signature" 2>/dev/null || die 1 "SHA256SUMS.sig of this release is damaged"
            openssl dgst -sha256 -verify "$key_file" -signature "$work/signature" "$work/SHA256SUMS" >/dev/null 2>&1
            ;;
        cosign) cosign verify-blob --insecure-ignore-tlog=true --key "$key_file" --signature "$work/SHA256SUMS.sig" "$work/SHA256SUMS" >/dev/null 2>&1 ;;
    esac || die 1 "the signature of SHA256SUMS is wrong: this is not a release of who holds the key"
    say "signature verified ($verifier)"
}

bring_binary() {
    binary=$bin_dir/llmbox
    if [ "$download" = false ]; then
        [ -x "$binary" ] || die 2 "$binary is not there, and INSTALL_LLMBOX_SKIP_DOWNLOAD is set"
        return 0
    fi
    [ -n "$artifacts" ] || find_loader
    find_summer
    make_work_dir
    find_version
    find_sum
    if [ -n "$want" ] && [ -x "$binary" ] && [ "$(sum_of "$binary")" = "$want" ]; then
        say "$binary is this release already"
        return 0
    fi
    say "fetching $file ${version:-}"
    fetch "$where$file" "$work/llmbox" || die 1 "$file could not be had: $(why)" "check INSTALL_LLMBOX_VERSION and the way to it (https_proxy)"
    if [ -n "$want" ]; then
        got=$(sum_of "$work/llmbox")
        [ "$got" = "$want" ] || die 1 "$file is damaged: its checksum is $got, SHA256SUMS says $want" "run this again; nothing was installed"
    fi
    # The old one stays until the new one has started once.
    placed=$bin_dir/.llmbox.$$
    if ! as_root cp "$work/llmbox" "$placed" || ! as_root chmod 755 "$placed"; then
        die 1 "$bin_dir can't take the binary" "df -h $bin_dir"
    fi
    as_root "$placed" version >/dev/null 2>"$work/error" </dev/null || die 1 "the binary doesn't start from $bin_dir: $(why)" "is it mounted noexec? INSTALL_LLMBOX_BIN_DIR=DIR names another directory"
    as_root mv -f "$placed" "$binary" || die 1 "$binary can't be replaced"
    placed=''
    say "installed $binary"
}

# Beside the binary is all of it; a completion that can't be written is no reason to stop.
bring_completion() {
    case "$bin_dir" in
        /usr/local/bin) completions=/usr/local/share/bash-completion/completions ;;
        *) return 0 ;;
    esac
    # shellcheck disable=SC2016 # expanded by the shell that is started
    as_root sh -c 'mkdir -p "$2" && "$1" completion bash >"$2/.llmbox.$$" && mv -f "$2/.llmbox.$$" "$2/llmbox" || rm -f "$2/.llmbox.$$"' \
        sh "$binary" "$completions" </dev/null 2>/dev/null || :
}

# carried prints the variables that must reach llmbox, for a shell to evaluate.
carried() {
    for name in $(env | awk -F= '/^(LLMBOX_[A-Z0-9_]+|HF_TOKEN|NO_COLOR|CI|TERM|LANG|LC_ALL|[a-z]+_proxy|[A-Z]+_PROXY)=/ { print $1 }'); do
        value=
        eval "value=\${$name-}"
        printf "export %s='%s'\n" "$name" "$(printf '%s' "$value" | sed "s/'/'\\\\''/g")"
    done
}

run_install() {
    mend=$fix
    for arg in "$@"; do
        case "$arg" in
            # Into a cluster: this machine is not looked at.
            --kubeconfig | --kubeconfig=* | --context | --context=*) mend=false ;;
        esac
    done
    [ "$mend" = false ] || set -- --fix "$@"
    clean_up
    trap - EXIT HUP INT TERM
    case " $* " in
        *' --kubeconfig'* | *' --context'*) exec "$binary" install "$@" </dev/null ;;
    esac
    # This machine, whatever other cluster the shell has in mind.
    unset KUBECONFIG
    if [ -z "$sudo" ]; then
        exec "$binary" install "$@" </dev/null
    fi
    # On standard input: what is in arguments can be read by everybody, and there is a sudo
    # that can't be told what to keep of the environment.
    # shellcheck disable=SC2016,SC2086 # for root's shell; two words, or one
    exec $sudo sh -c 'eval "$(cat)"; exec "$@" </dev/null' sh "$binary" install "$@" <<VARIABLES
$(carried)
VARIABLES
}

install_llmbox() {
    set -euf
    umask 022
    start=true options=true
    for arg in "$@"; do
        shift
        case "$options$arg" in
            true--download-only) start=false ;;
            true--help | true-h)
                usage
                exit 0
                ;;
            true--) options=false ;;
            *) set -- "$@" "$arg" ;;
        esac
    done
    settle
    # shellcheck disable=SC2086 # split at blanks, as the help says
    set -- ${INSTALL_LLMBOX_EXEC:-} "$@"
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' HUP TERM
    find_machine
    find_bin_dir
    bring_binary
    if [ "$start" = false ]; then
        clean_up
        [ "$bin_dir" != /usr/local/bin ] || bring_completion
        printf '%s\n' "$binary"
        exit 0
    fi
    bring_completion
    run_install "$@"
}

{ install_llmbox "$@"; }
