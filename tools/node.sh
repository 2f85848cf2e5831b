#!/usr/bin/env bash
# Puts the packages that clients/typescript pins into its node_modules. Instant when they are there.
# Without Node or npm it says so and leaves things as they are; a failure where QUARTET_REQUIRE_NODE=1. npm's own
# settings (registry, proxy, cache) apply as they are.
set -euo pipefail
cd -P "$(dirname "$0")/../clients/typescript"

readonly stamp=node_modules/.made-from

pinned() {
    cat package-lock.json .npmrc | sha256sum
}

is_made() {
    [[ $(cat "$stamp" 2>/dev/null) == "$(pinned)" ]]
}

# fail REASON: a line, and the status that the environment wants.
fail() {
    echo "node: $1; the TypeScript client is neither checked nor tested" >&2
    [[ ${QUARTET_REQUIRE_NODE:-} != 1 ]]
    exit
}

command -v node >/dev/null || fail "there is no Node (on Debian: apt-get install nodejs npm)"
exec 9<package.json
flock -w 300 9 # the gate runs this beside `make`, which does, too
! is_made || exit 0
command -v npm >/dev/null || fail "there is no npm (on Debian: apt-get install npm)"
timeout 300 npm ci --quiet || fail "npm ci failed"
pinned >"$stamp"
