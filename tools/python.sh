#!/bin/sh
# Print a Python that can carry the project's environment: 3.11 to 3.13, which the pins in requirements.txt are
# known to work on, else a newer one. Being found is not enough, it must run: some machines have names on the
# path that lead nowhere. $PYTHON, if set, is the only candidate.
usable() {
    "$1" -c "import sys, venv, ensurepip; sys.exit(not ($2))" >/dev/null 2>&1
}
for wanted in "(3, 11) <= sys.version_info[:2] <= (3, 13)" "sys.version_info >= (3, 11)"; do
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python python3.14}; do
        if usable "$name" "$wanted"; then
            command -v "$name"
            exit 0
        fi
    done
done
{
    echo "error: found no Python that can make the project's environment."
    for name in ${PYTHON:-python3 python}; do
        if command -v "$name" >/dev/null 2>&1; then
            echo "  $(command -v "$name") is: $("$name" --version 2>&1 | head -n 1)"
            "$name" -c "import venv, ensurepip" >/dev/null 2>&1 || echo "  and it lacks venv or ensurepip"
        fi
    done
    echo "Wanted: Python 3.11 or newer with venv (on Debian and Ubuntu the package python3-venv)."
    echo "If it is installed under another name: make PYTHON=/path/to/python3.12 ..."
} >&2
exit 1
