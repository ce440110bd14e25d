#!/bin/sh
# Setup script of a Brev launchable, and of any other machine that runs a script at its
# first boot: it writes down what was asked for, starts the work as a systemd unit and
# returns within seconds. docs/brev.md has the launchable's settings.
#
# Read from the environment:
#   HF_TOKEN         Hugging Face token, for models that want one
#   MODEL            Hugging Face name of the model (default: the best that fits)
#   PORT             TCP port of the gateway (default: 8080)
#   LLMBOX_URL       https address of the releases
#   LLMBOX_VERSION   version to install (default: the newest)
#   LLMBOX_FLAGS     more flags of llmbox install, split at blanks
#
# Left behind: /var/log/llmbox/launch.log, and in /var/lib/llmbox/launch the file `ready`
# once the box serves, or `failed` with the reason.

die() {
    printf 'llmbox: %s\n' "$1" >&2
    exit 2
}

# check NAME VALUE ALLOWED: an extra line in a parameter would be a line of a unit.
check() {
    case "$2" in
        *'
'*) die "$1 has more than one line" ;;
    esac
    # shellcheck disable=SC2254 # a pattern
    case "$2" in
        *[!$3]*) die "$1 has a character that doesn't belong there" ;;
    esac
}

as_root() {
    # shellcheck disable=SC2086 # two words, or none
    $sudo "$@"
}

# put FILE MODE: standard input, whole or not at all, never readable by more than MODE says.
put() {
    # shellcheck disable=SC2016 # expanded by the shell that is started
    as_root sh -c 'umask 077 && cat >"$1.new" && chmod "$2" "$1.new" && mv -f "$1.new" "$1"' sh "$1" "$2"
}

# The long work, as root, in the unit. It is a file of its own, so it may be read and run
# again by hand.
work() {
    cat <<'WORK'
#!/bin/sh
# Written by llmbox' setup script; started by llmbox-launch.service until the box serves.
run() {
    set -eu
    umask 077
    here=/var/lib/llmbox/launch
    . "$here/settings"
    rm -f "$here/failed"
    say() { printf '%s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"; }
    fail() {
        say "$1"
        printf '%s\n' "$1" >"$here/failed"
        exit "${2:-1}"
    }
    # What cloud-init installs, and the lock it holds, would be in the way. A machine on
    # which it never ends is not waited for without end.
    if command -v cloud-init >/dev/null 2>&1; then
        say "waiting for cloud-init"
        timeout "${LLMBOX_BOOT_WAIT:-900}" cloud-init status --wait >/dev/null 2>&1 || say "cloud-init ended with code $?, going on"
    fi
    # apt takes dpkg's lock as dpkg does, and waits for it; it is never taken from anybody.
    if command -v apt-get >/dev/null 2>&1; then
        say "waiting for dpkg's lock"
        DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout="${LLMBOX_BOOT_WAIT:-900}" -qq check >/dev/null 2>&1 || say "apt-get check ended with code $?, going on"
    fi
    tmp=$(mktemp -d /var/tmp/llmbox-launch.XXXXXX)
    trap 'rm -rf "$tmp"' EXIT
    trap 'exit 143' HUP INT TERM
    get() {
        curl -q -fsSL --proto '=https' --proto-redir '=https' --tlsv1.2 --retry 5 --retry-delay 2 --connect-timeout 30 --speed-limit 1024 --speed-time 30 -o "$2" "$1"
    }
    if [ -z "$version" ]; then
        get "$url/latest" "$tmp/latest" || fail "$url/latest could not be had (curl's code $?)"
        read -r version <"$tmp/latest" || :
        case "$version" in
            *[!A-Za-z0-9.+~_-]* | '' | .*) fail "$url/latest holds no version" ;;
        esac
    fi
    get "$url/$version/install.sh" "$tmp/install.sh" || fail "install.sh of $version could not be had (curl's code $?)"
    get "$url/$version/SHA256SUMS" "$tmp/SHA256SUMS" || fail "SHA256SUMS of $version could not be had (curl's code $?)"
    (cd "$tmp" && grep -E '^[0-9a-f]{64} [ *]install\.sh$' SHA256SUMS >sum && [ "$(wc -l <sum)" -eq 1 ] && sha256sum -c sum) >/dev/null 2>&1 ||
        fail "install.sh of $version is damaged, or SHA256SUMS has no line for it"
    set -- --yes
    [ -z "$model" ] || set -- "$@" --model "$model"
    [ -z "$port" ] || set -- "$@" --port "$port"
    [ ! -s "$here/hf-token" ] || set -- "$@" --hf-token-file "$here/hf-token"
    # shellcheck disable=SC2086 # split at blanks, as the setup script says
    set -- "$@" $flags
    say "installing llmbox $version"
    code=0
    INSTALL_LLMBOX_URL=$url INSTALL_LLMBOX_VERSION=$version DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a \
        sh "$tmp/install.sh" "$@" </dev/null &
    installing=$!
    # A shell that waits for what it called acts on no signal, and the machine would wait
    # for it when it is switched off.
    trap 'kill -TERM "$installing" 2>/dev/null; wait "$installing"; exit 143' HUP INT TERM
    wait "$installing" || code=$?
    case "$code" in
        0) ;;
        2 | 3) fail "llmbox install ended with code $code: this needs a person; see the log, then: systemctl start llmbox-launch" "$code" ;;
        *) fail "llmbox install ended with code $code; it is tried again" "$code" ;;
    esac
    date -u +%Y-%m-%dT%H:%M:%SZ >"$here/ready"
    chmod 644 "$here/ready"
    say "the box serves"
}

{ run "$@"; }
WORK
}

unit() {
    cat <<'UNIT'
# Written by llmbox' setup script.
[Unit]
Description=Make this machine a box (llmbox)
Wants=network-online.target
After=network-online.target
ConditionPathExists=!/var/lib/llmbox/launch/ready
StartLimitIntervalSec=6h
StartLimitBurst=5

[Service]
Type=exec
ExecStart=/bin/sh /var/lib/llmbox/launch/work.sh
Restart=on-failure
RestartSec=30
# Bad usage and a failed check don't get better by themselves.
RestartPreventExitStatus=2 3
# A process that k3s made must not end with this unit.
KillMode=process
StandardOutput=append:/var/log/llmbox/launch.log
StandardError=inherit

[Install]
WantedBy=multi-user.target
UNIT
}

setup() {
    set -euf
    umask 077
    # What a release fills in. Empty in the source: the project owns no host.
    release_url=''
    release_version=''
    url=${LLMBOX_URL:-$release_url}
    url=${url%/}
    version=${LLMBOX_VERSION:-$release_version}
    check HF_TOKEN "${HF_TOKEN:-}" 'A-Za-z0-9_.-'
    check MODEL "${MODEL:-}" 'A-Za-z0-9_./-'
    check PORT "${PORT:-}" '0-9'
    check LLMBOX_URL "$url" 'A-Za-z0-9_.:/~%-'
    check LLMBOX_VERSION "$version" 'A-Za-z0-9.+~_-'
    check LLMBOX_FLAGS "${LLMBOX_FLAGS:-}" 'A-Za-z0-9_.:/=,@ -'
    case "$url" in
        https://?*) ;;
        '') die "LLMBOX_URL is not set: no address of releases is known" ;;
        *) die "LLMBOX_URL must begin with https://" ;;
    esac
    case "$version" in
        .*) die "LLMBOX_VERSION is no version" ;;
        '' | v*) ;;
        *) version=v$version ;;
    esac
    sudo=''
    if [ "$(id -u)" != 0 ]; then
        sudo='sudo -n'
        sudo -n true 2>/dev/null </dev/null || die "this needs root, or sudo without a password"
    fi
    # In a container nothing would keep k3s running.
    [ -d /run/systemd/system ] || die "systemd doesn't run here; in Brev choose VM mode, not a container"

    launch=/var/lib/llmbox/launch
    as_root mkdir -p "$launch" /var/log/llmbox
    as_root chmod 700 "$launch"
    if [ -n "${HF_TOKEN:-}" ]; then
        # On standard input: an argument could be read by everybody.
        printf '%s\n' "$HF_TOKEN" | put "$launch/hf-token" 600
    fi
    unset HF_TOKEN
    {
        printf "url='%s'\n" "$url"
        printf "version='%s'\n" "$version"
        printf "model='%s'\n" "${MODEL:-}"
        printf "port='%s'\n" "${PORT:-}"
        printf "flags='%s'\n" "${LLMBOX_FLAGS:-}"
    } | put "$launch/settings" 600
    work | put "$launch/work.sh" 700
    unit | put /etc/systemd/system/llmbox-launch.service 644
    as_root rm -f "$launch/failed"
    as_root systemctl daemon-reload
    as_root systemctl enable llmbox-launch.service >/dev/null 2>&1 || die "systemctl can't enable llmbox-launch.service"
    # Not waited for: a first boot is given up when its script takes long.
    as_root systemctl start --no-block llmbox-launch.service
    echo "llmbox: the work goes on in llmbox-launch.service"
    echo "  log:   /var/log/llmbox/launch.log"
    echo "  ready: /var/lib/llmbox/launch/ready is there once the box serves"
}

{ setup "$@"; }
