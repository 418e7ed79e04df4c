#!/usr/bin/env bash
# Install the cookbook into an environment of its own: tests/acceptance/install.sh VENV
#
# Recipes are clients: neither vLLM nor the server is in their sight. The cookbook is installed without its own list
# of packages, since that names a tml-renderers newer than any that is published; only recipes for audio import it.
# The CPU build of torch is looked for where pip is configured to look, and only then on the PyTorch CPU index.
set -euo pipefail
venv=$(realpath --canonicalize-missing "$1")
cd "$(dirname "$0")"
python3 -m venv --clear "$venv"
pip_install() { "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-compile "$@"; }
pip_install "torch==2.13.0+cpu" 2>/dev/null ||
    pip_install --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
pip_install --requirement requirements.txt
pip_install --no-deps tinker_cookbook==0.6.1
"$venv/bin/python" -c "import tinker_cookbook, textarena"
