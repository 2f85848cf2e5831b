#!/usr/bin/env bash
# Makes .venv with Quartet and what it needs. Quick when nothing changed; repairs an environment that is broken.
#   tools/setup.sh [EXTRAS]     EXTRAS: comma-separated extras of pyproject.toml, torch,dev by default
# PYTHON names the interpreter to use; pip's own settings (index, proxy, cache) apply as they are.
# SITE_PACKAGES=1: on top of the packages that PYTHON has, as in a container that brings an engine; what they satisfy
# stays as it is.
set -euo pipefail
cd -P "$(dirname "$0")/.."

extras=${1-torch,dev}
site_packages=${SITE_PACKAGES:-0}
venv=.venv
stamp=$venv/.setup-done

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed, and ${PYTHON:-python3} is not (set PYTHON to another interpreter)"
}

# What the environment was made from and where: scripts in it hold the directory's name. Settings of linters and
# tests don't count.
fingerprint() {
    { awk '/^\[/ { counts = !/^\[+tool\./ || /tool\.setuptools/ } counts' pyproject.toml
      cat constraints.txt
      echo "$extras" "$PWD" "$site_packages"; } | sha256sum
}

is_usable() {
    grep -qsx "include-system-site-packages = $( ((site_packages)) && echo true || echo false)" "$venv/pyvenv.cfg" &&
        "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
        grep -qsF "$PWD/$venv/bin/python" "$venv/bin/pip"
}

check_disk_space() {
    local need_mib=600 free_mib
    if [[ ,$extras, == *,torch,* ]] && ! compgen -G "$venv/lib/python3*/site-packages/torch" >/dev/null; then
        need_mib=7000 # torch with its CUDA libraries
    fi
    free_mib=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1024))
    ((free_mib >= need_mib)) ||
        die "about $need_mib MiB are needed in $PWD, $free_mib MiB are free" \
            "('make setup EXTRAS=dev' goes without torch: enough for a router or a mock fleet)"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments; on Debian: apt-get install python3-venv"
    [[ ! -e $venv ]] || echo "setup: $venv is broken, outdated or was moved; making it anew"
    local options=(--clear)
    ((!site_packages)) || options+=(--system-site-packages)
    "$python" -m venv "${options[@]}" "$venv"
}

if [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]] && is_usable; then
    exit 0
fi
check_disk_space
is_usable || make_venv
rm -f "$stamp"
echo "setup: installing quartet${extras:+[$extras]} into $venv"
export PIP_COMPILE=0 # it would use one core; see below
if ((site_packages)); then
    # Not our exact versions: they are of a machine without those packages. Nor the container's, made without Quartet.
    PIP_CONSTRAINT='' "$venv/bin/python" -m pip install --disable-pip-version-check -e ".${extras:+[$extras]}"
else
    "$venv/bin/python" -m pip install --disable-pip-version-check -c constraints.txt -e ".${extras:+[$extras]}"
fi
# Some packages have files that are no Python of this version, so its exit code says nothing.
"$venv/bin/python" -m compileall -qq -j 0 "$venv" || true
fingerprint >"$stamp"
echo "setup: done"
