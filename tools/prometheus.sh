#!/usr/bin/env bash
# Sees to it that Prometheus is there, for `make test-deploy`: the one on the PATH, else Debian's package, unpacked in
# .tools without starting its service. Where neither can be had, the tests that need it are skipped; a failure where
# QUARTET_REQUIRE_PROMETHEUS=1.
set -euo pipefail
cd -P "$(dirname "$0")/.."

readonly target=.tools/prometheus

command -v prometheus >/dev/null && exit
[[ -x $target/usr/bin/prometheus ]] && exit

# fail REASON: a line, and the status that the environment wants.
fail() {
    echo "tools: $1: its tests are skipped" >&2
    [[ ${QUARTET_REQUIRE_PROMETHEUS:-} != 1 ]]
    exit
}

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
    fail "no prometheus, and no apt-get that would fetch it"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if (cd "$scratch" && apt-get download -qq -o APT::Sandbox::User=root prometheus); then
    mkdir -p "$target"
    dpkg-deb -x "$scratch"/prometheus_*.deb "$target"
else
    fail "Debian's package prometheus could not be fetched (apt-get update?)"
fi
