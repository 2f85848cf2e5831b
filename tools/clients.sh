#!/usr/bin/env bash
# Makes .clients/NAME for each file of tests/clients: clients of OpenAI's API whose pins don't go together with ours.
set -euo pipefail
cd -P "$(dirname "$0")/.."

for requirements in tests/clients/*.txt; do
    venv=.clients/$(basename "$requirements" .txt)
    cmp -s "$requirements" "$venv/.installed" && continue
    .venv/bin/python -m venv --clear "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check -r "$requirements"
    cp "$requirements" "$venv/.installed"
done
