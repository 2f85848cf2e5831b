#!/usr/bin/env bash
# Checks the layout of the Go code (gofmt), and finds common mistakes in it (go vet). Where there is no Go, it says that
# nothing was checked, and fails if QUARTET_REQUIRE_GO=1.
set -euo pipefail
cd -P "$(dirname "$0")/.."
source tools/go.sh

if ! has_go; then
    echo "lint-go: not checked: there is no Go that takes tools/go.mod" >&2
    [[ ${QUARTET_REQUIRE_GO:-} != 1 ]]
    exit
fi
unformatted=$("$(go env GOROOT)/bin/gofmt" -l clients/go benchmarks)
if [[ -n $unformatted ]]; then
    printf 'lint-go: run gofmt -w on %s\n' $unformatted >&2
    exit 1
fi
go vet ./clients/go/... ./benchmarks/...
