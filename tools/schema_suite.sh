#!/usr/bin/env bash
# Puts the JSON Schema test suite into .tools/schema-suite: the source distribution of jsonschema has it, in the version
# that constraints.txt pins. Instant when it is there. pip's own settings (index, proxy, cache) apply as they are.
set -euo pipefail
cd -P "$(dirname "$0")/.."

pin=$(grep '^jsonschema==' constraints.txt)
readonly pin suite=.tools/schema-suite

[[ $(cat "$suite/.from" 2>/dev/null) != "$pin" ]] || exit 0
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
if ! .venv/bin/pip download -q --disable-pip-version-check --no-deps --no-binary jsonschema "$pin" -d "$scratch"; then
    echo "schema suite: pip can't get the source distribution of $pin; what needs it is skipped" >&2
    exit 1
fi
mkdir "$scratch/suite"
tar -xzf "$scratch"/jsonschema-*.tar.gz -C "$scratch/suite" --strip-components=3 --wildcards '*/json/tests'
echo "$pin" >"$scratch/suite/.from"
rm -rf "$suite"
mkdir -p .tools
mv "$scratch/suite" "$suite"
