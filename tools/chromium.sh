#!/bin/sh
# Make sure that the browser tests have a browser: found, or installed by apt-get as root, or say what is missing.
for name in ${CHROMIUM:-chromium chromium-browser google-chrome}; do
    if "$name" --version >/dev/null 2>&1; then exit 0; fi
done
if [ -z "${CHROMIUM:-}" ] && [ "$(id -u)" = 0 ] && [ -e /etc/debian_version ] && command -v apt-get >/dev/null; then
    echo "browser: installing Debian's chromium with apt-get, for the tests"
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null &&
        chromium --version >/dev/null 2>&1; then
        exit 0
    fi
    echo "error: apt-get could not install a working chromium (its message is above)." >&2
    exit 1
fi
{
    echo "error: found no Chromium (looked for ${CHROMIUM:-chromium, chromium-browser, google-chrome})."
    echo "The browser tests need one. On Debian: sudo apt-get install --no-install-recommends chromium"
    echo "Elsewhere install Chromium or Chrome and name it: make test CHROMIUM=/path/to/chrome"
    echo "\`make check\` runs everything that needs no browser."
} >&2
exit 1
