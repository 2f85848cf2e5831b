#!/usr/bin/env bash
# Puts the packages that clients/typescript pins into its node_modules, and then runs one of their programs there, if one
# is given. The first part is instant when they are there.
#     tools/node.sh [PROGRAM [ARGUMENTS]]      tools/node.sh tsc
# Without Node or npm it says so and does nothing; a failure where QUARTET_REQUIRE_NODE=1. npm's own settings (registry,
# proxy, cache) apply as they are.
set -euo pipefail
cd -P "$(dirname "$0")/../clients/typescript"

readonly stamp=node_modules/.made-from

pinned() {
    sha256sum <package-lock.json
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

install() {
    command -v npm >/dev/null || fail "there is no npm (on Debian: apt-get install npm)"
    timeout 300 npm ci --quiet >/dev/null || fail "npm ci failed"
    pinned >"$stamp"
}

command -v node >/dev/null || fail "there is no Node (on Debian: apt-get install nodejs npm)"
exec 9<package.json
flock -w 300 9 # the gate runs this beside `make`, which does, too
is_made || install
exec 9<&-
(($# == 0)) || exec "node_modules/.bin/$1" "${@:2}"
