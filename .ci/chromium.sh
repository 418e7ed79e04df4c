#!/usr/bin/env bash
# Debian's chromium, for the tests of tests/browser: installed where it is missing and root may do so. Elsewhere these
# tests are skipped, and say so.
set -euo pipefail

if command -v chromium >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no chromium here, and no Debian to install it on as root: the tests in a browser are skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; }; then
    echo "chromium could not be installed: the tests in a browser are skipped" >&2
fi
