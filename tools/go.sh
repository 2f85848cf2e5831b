#!/usr/bin/env bash
# Runs Go with these arguments, here, in a version that tools/go.mod takes. Exits with 127 where there is none.
#     tools/go.sh vet ./clients/go/...
# Sourced, it gives has_go.

needed_go=go$(awk '$1 == "go" { print $2 }' "$(dirname "${BASH_SOURCE[0]}")/go.mod")
readonly needed_go

# Puts a Go that go.mod takes on the PATH: the one that is there, or else the one that it can fetch.
has_go() {
    command -v go >/dev/null || return 1
    is_go_new_enough && return
    printf 'tools: fetching %s, for %s is too old\n' "$needed_go" "$(cd / && GOTOOLCHAIN=local go env GOVERSION)" >&2
    local toolchain
    toolchain=$(fetch_toolchain) || return 1
    PATH=$toolchain/bin:$PATH
    is_go_new_enough
}

# A Go since 1.21 that may fetches the one that go.mod asks for right here.
is_go_new_enough() {
    local version
    version=$(go env GOVERSION 2>/dev/null) || return 1
    [[ $(printf '%s\n' "$needed_go" "$version" | sort -V | head -n 1) == "$needed_go" ]]
}

# Go's releases are Go modules too, so that a Go of any age can get them from its module proxy, checked as any module
# is. Programs lose their executable bit on that way. Prints the directory.
fetch_toolchain() {
    local directory module
    module=golang.org/toolchain@v0.0.1-$needed_go.$(cd / && go env GOOS)-$(cd / && go env GOARCH)
    directory=$(cd / && go mod download -json "$module" | awk -F '"' '$2 == "Dir" { print $4 }') || return 1
    find "$directory/bin" "$directory/pkg/tool" -type f -exec chmod +x {} +
    printf '%s\n' "$directory"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    set -euo pipefail
    has_go || {
        echo "tools: there is no Go here, or one that is too old for $needed_go and can't fetch it" >&2
        exit 127
    }
    exec go "$@"
fi
