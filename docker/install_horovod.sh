#!/usr/bin/env bash
# Builds and installs Horovod for the torch and TensorFlow of one Python.
#
# The one recipe: make, users and container images all run this file. It needs
# nothing beside it except constraints.txt, and that only for the version.
# `install_horovod.sh --help` says what it knows and what it does.

set -euo pipefail

readonly RECIPE=1 # part of the key: raise it when the build itself changes
readonly KNOWN_VERSION=0.28.1
readonly SDIST_SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

readonly EX_USAGE=2 EX_NEED=3 EX_BUILD=4 EX_CHECK=5 EX_NO_FRAMEWORK=6

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here

usage() {
    cat <<'HELP'
Usage: install_horovod.sh [options]

Builds Horovod 0.28.1 from its source release for the torch and the TensorFlow
(either or both) that are installed in one Python, and installs it there. The
built wheel is kept and used again; when Horovod is already there and works,
nothing is done. Linux only.

Options
  --python PATH         the Python to install into (default: python3)
  --version VERSION     Horovod's version (default: HOROVOD_VERSION, else the
                        line horovod== of constraints.txt beside this script)
  --with-mpi auto|yes|no
                        MPI beside Gloo (default: auto, yes when mpicxx and
                        mpirun are found)
  --jobs N              compilers at a time (default: by cores and memory,
                        2 GB each)
  --no-cache            neither use a kept wheel nor keep the new one
  --print-key           print the key of the wheel and stop
  --check-only          build and install nothing: load Horovod and say whether
                        it has this key and works
  --help                this text

Combinations
  built and run on CPU  Python 3.11, gcc 12, torch 2.13.0 and TensorFlow 2.21.0
                        together, Gloo and Open MPI 4.1
  built for NCCL, loaded and run on CPU tensors, never run on a GPU
                        torch 2.14.1 (CUDA 13), NCCL 2.30; and TensorFlow 2.21
                        with CUDA, which was run in one process. These two in
                        separate environments: each brings its own NCCL wheel,
                        which overwrites the other's.
  others                are tried by the same rules and were not seen. C++
                        standard: 17 for all; in Horovod's torch part 14 for
                        torch < 2.1, 17 from 2.1 on, 20 from 2.14 on.
  Never built: MXNet; Horovod's opt-in XLA kernels (TensorFlow's wheels lack
  the headers they include).

GPUs
  HOROVOD_GPU_OPERATIONS=NCCL, HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME,
  HOROVOD_NCCL_LINK, HOROVOD_BUILD_CUDA_CC_LIST and the other build variables
  of Horovod are passed on and are part of the key. With TensorFlow 2.21 or
  newer, the helper that it no longer exports (AsGpuStreamValue) is defined
  inside Horovod. Such a wheel holds absolute paths: it is used only for the
  place it was built for.

Other environment
  HOROVOD_WITHOUT_PYTORCH=1, HOROVOD_WITHOUT_TENSORFLOW=1
                        leave that framework out although it is installed
  XDG_CACHE_HOME        wheels and logs of failed builds are kept in
                        ${XDG_CACHE_HOME:-~/.cache}/horovod_gradcomp
  CXX, TMPDIR, and pip's own configuration

Exit codes
  0  Horovod is installed and works       4  download, build or install failed
  2  wrong usage                          5  installed, but does not work
  3  something needed is missing          6  neither torch nor TensorFlow found
HELP
}

# ---------------------------------------------------------------- messages

say() { printf 'horovod: %s\n' "$*"; }
complain() { printf 'horovod: %s\n' "$*" >&2; }
die() {
    local code=$1
    shift
    complain "$@"
    exit "$code"
}
clock() { printf '%dm%02ds' $(($1 / 60)) $(($1 % 60)); }

# ---------------------------------------------------------------- arguments

python=python3
version=${HOROVOD_VERSION:-}
with_mpi=auto
jobs=
use_cache=1
action=install

need_value() { [[ $# -ge 2 && -n $2 ]] || die $EX_USAGE "$1 needs a value (see --help)"; }

while (($#)); do
    case $1 in
        --*=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            continue
            ;;
        --python) need_value "$@" && python=$2 && shift ;;
        --version) need_value "$@" && version=$2 && shift ;;
        --with-mpi) need_value "$@" && with_mpi=$2 && shift ;;
        --jobs) need_value "$@" && jobs=$2 && shift ;;
        --no-cache) use_cache=0 ;;
        --print-key) action=print-key ;;
        --check-only) action=check ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) die $EX_USAGE "unknown argument '$1' (see --help)" ;;
    esac
    shift
done

[[ $with_mpi =~ ^(auto|yes|no)$ ]] || die $EX_USAGE "--with-mpi takes auto, yes or no, not '$with_mpi'"
[[ -z $jobs || $jobs =~ ^[1-9][0-9]*$ ]] || die $EX_USAGE "--jobs takes a number from 1 up, not '$jobs'"
[[ $(uname -s) == Linux ]] || die $EX_USAGE "this recipe knows Linux only, not $(uname -s)"
[[ ${HOROVOD_GPU:-CUDA} == CUDA ]] || die $EX_USAGE "HOROVOD_GPU=$HOROVOD_GPU: this recipe knows CUDA only"

if [[ -z $version && -r $here/constraints.txt ]]; then
    version=$(sed -n 's/^horovod==\([^ ;#]*\).*/\1/p' "$here/constraints.txt")
fi
[[ -n $version ]] || die $EX_USAGE "which Horovod? Give --version $KNOWN_VERSION (no constraints.txt with a line horovod== beside this script)"
[[ $version == "$KNOWN_VERSION" ]] || die $EX_USAGE "this recipe knows Horovod $KNOWN_VERSION only, not $version"

python=$(command -v -- "$python") || die $EX_USAGE "no such Python: give --python PATH"
[[ $python == /* ]] || python=$PWD/$python

# ---------------------------------------------------------------- what is there

# One line a fact, in this order; imports neither torch nor TensorFlow.
probe() {
    (cd / && "$python" - 2>/dev/null) <<'PROBE'
import glob, hashlib, importlib.util, json, os, platform, runpy, sys, sysconfig
from importlib import metadata


def folder_of(module):
    spec = importlib.util.find_spec(module)
    return os.path.dirname(spec.origin) if spec is not None and spec.origin else ""


def values(*path):
    try:
        return runpy.run_path(os.path.join(*path))
    except OSError:
        return {}


torch, tensorflow, horovod = map(folder_of, ("torch", "tensorflow", "horovod"))
torch_facts = values(torch, "version.py") if torch else {}
tf_build = values(tensorflow, "python", "platform", "build_info.py") if tensorflow else {}
tf_version = ""
if tensorflow:
    for name in ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "tf-nightly-cpu"):
        try:
            tf_version = metadata.version(name)
            break
        except metadata.PackageNotFoundError:
            pass
    else:
        import tensorflow as tf

        tf_version = tf.__version__
try:
    horovod_version = metadata.version("horovod") if horovod else ""
except metadata.PackageNotFoundError:
    horovod_version = ""
built_for = {}
if horovod:
    try:
        with open(os.path.join(horovod, "metadata.json")) as file:
            built_for = json.load(file)
    except (OSError, ValueError):
        pass
seen = hashlib.sha256(sys.version.encode())
for folder, pattern in (
    (horovod, "metadata.json"),
    (horovod, "*/mpi_lib*.so"),
    (torch, "version.py"),
    (torch, "lib/libtorch_[cp]*.so"),
    (tensorflow, "libtensorflow_*.so*"),
):
    for path in sorted(glob.glob(os.path.join(folder, pattern))) if folder else ():
        stat = os.stat(path)
        seen.update(repr((path, stat.st_ino, stat.st_size, stat.st_mtime_ns)).encode())
managed = sys.prefix == sys.base_prefix and os.path.exists(
    os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
)
tag = "cp%d%d%s" % (sys.version_info[0], sys.version_info[1], getattr(sys, "abiflags", ""))
place = sysconfig.get_platform().replace("-", "_").replace(".", "_")
for fact in (
    platform.python_version(),
    "-".join([tag, place, "".join(platform.libc_ver()) or "libc"]),
    sysconfig.get_path("include"),
    sysconfig.get_path("platlib"),
    torch_facts.get("__version__", ""),
    torch_facts.get("cuda") or "",
    tf_version,
    "cuda" if tf_build.get("build_info", {}).get("is_cuda_build") else "cpu",
    "yes" if importlib.util.find_spec("pip") else "no",
    "yes" if managed else "no",
    horovod_version,
    values(horovod, "gradcomp_recipe.py").get("KEY", "") if horovod else "",
    built_for.get("pytorch", ""),
    built_for.get("tensorflow", ""),
    seen.hexdigest()[:16],
):
    print(fact)
PROBE
}

read_facts() {
    local facts
    mapfile -t facts < <(probe)
    ((${#facts[@]} == 15)) || die $EX_USAGE "cannot ask $python about itself: is it a Python 3.8 or newer?"
    py_version=${facts[0]} py_tag=${facts[1]} py_include=${facts[2]} py_platlib=${facts[3]}
    torch=${facts[4]} torch_cuda=${facts[5]} tf=${facts[6]} tf_flavour=${facts[7]}
    has_pip=${facts[8]} managed=${facts[9]}
    horovod=${facts[10]} horovod_key=${facts[11]} horovod_torch=${facts[12]} horovod_tf=${facts[13]}
    fingerprint=${facts[14]}
    [[ ${HOROVOD_WITHOUT_PYTORCH:-} == 1 ]] && torch='' torch_cuda=''
    [[ ${HOROVOD_WITHOUT_TENSORFLOW:-} == 1 ]] && tf=''
    return 0
}

at_least() { # at_least VERSION MAJOR MINOR
    [[ $1 =~ ^([0-9]+)\.([0-9]+) ]] || return 1
    ((BASH_REMATCH[1] > $2 || (BASH_REMATCH[1] == $2 && BASH_REMATCH[2] >= $3)))
}

has() { command -v -- "$1" >/dev/null 2>&1; }

mpi_name() { # vendor and major version: another one needs another wheel
    local text
    text=$( (mpirun --version || true) 2>&1 </dev/null)
    case $text in
        *'Open MPI'*) echo "openmpi$(grep -oE '[0-9]+' <<<"$text" | head -n 1)" ;;
        *Intel*) echo intelmpi ;;
        *HYDRA*) echo mpich ;;
        *) echo othermpi ;;
    esac
}

find_nvcc() {
    local home
    for home in "${HOROVOD_CUDA_HOME:-}" "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
        [[ -n $home && -x $home/bin/nvcc ]] && echo "$home/bin/nvcc" && return
    done
    command -v nvcc
}

gpu_variables() { compgen -e | grep -E '^HOROVOD_GPU_(OPERATIONS|ALLREDUCE|ALLGATHER|BROADCAST|ALLTOALL|REDUCESCATTER)$' || true; }

decide() {
    local name
    mpi=no mpi_kind=nompi
    if [[ $with_mpi == yes ]] || { [[ $with_mpi == auto ]] && has mpicxx && has mpirun; }; then
        mpi=yes mpi_kind=$(mpi_name)
    fi
    gpu=no nccl=no gpu_kind=nogpu
    for name in $(gpu_variables); do
        [[ -n ${!name} ]] && gpu=yes
        [[ ${!name} == NCCL ]] && nccl=yes
    done
    if [[ $nccl == yes ]]; then
        gpu_kind=nccl
    elif [[ $gpu == yes ]] || { [[ -n $torch_cuda ]] && find_nvcc >/dev/null; }; then
        gpu_kind=cuda # Horovod then compiles its torch part for CUDA by itself
    fi
}

# Settings that change what is compiled, beyond those spelled out in the key.
build_variables() {
    local name
    for name in $(compgen -e | LC_ALL=C sort); do
        case $name in
            HOROVOD_GPU | HOROVOD_GPU_* | HOROVOD_CPU_OPERATIONS | HOROVOD_ALLOW_MIXED_GPU_IMPL | \
                HOROVOD_BUILD_* | HOROVOD_CUDA_HOME | HOROVOD_NCCL_* | HOROVOD_DEBUG | \
                HOROVOD_WITH_NVTX | HOROVOD_WITHOUT_NVTX | CFLAGS | CXXFLAGS | CPPFLAGS | LDFLAGS | CXX)
                [[ -n ${!name} ]] && printf '%s=%s\n' "$name" "${!name}"
                ;;
        esac
    done
    if [[ $gpu_kind != nogpu ]]; then # the wheel holds absolute paths
        printf '%s\n' "$py_platlib" "$(find_nvcc || true)"
    fi
}

make_key() {
    local settings
    key="horovod-$version-$py_tag"
    key+="-torch${torch:-0}-tf${tf:-0}${tf:+$tf_flavour}-$mpi_kind-$gpu_kind-r$RECIPE"
    settings=$(build_variables)
    [[ -z $settings ]] || key+="-$(sha256sum <<<"$settings" | cut -c 1-10)"
}

# ---------------------------------------------------------------- running things

tmp=
stage=
child=

# shellcheck disable=SC2317 # called by trap
cleanup() {
    if [[ -n $child ]]; then
        kill -TERM -- "-$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
    [[ -z $stage ]] || rm -rf -- "$stage"
    [[ -z $tmp ]] || rm -rf -- "$tmp"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

last_tick=0
tick() { # tick TEXT SECONDS: one moving line on a terminal, else a line every 30 s
    if [[ -t 1 ]]; then
        printf '\r\033[K         %s, %s' "$1" "$(clock "$2")"
    elif (($2 - last_tick >= 30)); then
        last_tick=$2
        say "  $1, $(clock "$2")"
    fi
}
end_ticks() {
    last_tick=0
    [[ ! -t 1 ]] || printf '\r\033[K'
}

percent() { tail -c 100000 -- "$log" | grep -aoE '^ *\[ *[0-9]+%\]' | tail -n 1 | tr -d '[] ' || true; }

# logged LABEL COMMAND...: output goes to the log; the build and all it starts are
# one process group, so that an interrupted script leaves no compiler behind.
logged() {
    local label=$1 start=$SECONDS code=0 done_part=
    shift
    setsid "$@" >>"$log" 2>&1 </dev/null {lock}>&- &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        [[ $label != compiling ]] || done_part=$(percent)
        tick "$label${done_part:+ $done_part}" $((SECONDS - start))
        sleep 0.5
    done
    wait "$child" || code=$?
    child=
    end_ticks
    return $code
}

keep_log() {
    local kept folder=$cache/logs
    mkdir -p -- "$folder" 2>/dev/null || folder=${TMPDIR:-/tmp}
    kept=$(mktemp "$folder/$key.XXXXXX.log")
    cp -- "$log" "$kept"
    echo "$kept"
}

failed() { # failed WHAT
    complain "$1 failed. The first errors in the log, then its last lines:"
    {
        grep -aE -A 3 '(^|[^a-z_])(fatal error|error:|CMake Error|Error:|ERROR:)' -- "$log" | head -n 20 || true
        echo '...'
        tail -n 20 -- "$log"
    } | cut -c 1-300 | sed 's/^/  | /' >&2
    die $EX_BUILD "the whole log: $(keep_log)"
}

# ---------------------------------------------------------------- needs

packages_command() { # packages_command NAMES-ON-DEBIAN...
    local sudo=
    ((EUID == 0)) || sudo='sudo '
    if has apt-get; then
        echo "${sudo}apt-get update && ${sudo}apt-get install -y $*"
    else
        echo "install what Debian calls: $*"
    fi
}

check_needs() {
    local missing=() packages=() nvcc include=() standard=17 compiler dir
    read -ra compiler <<<"${CXX:-c++}"
    need() { # need WHAT DEBIAN-PACKAGE
        missing+=("$1")
        [[ -z ${2:-} || " ${packages[*]} " == *" $2 "* ]] || packages+=("$2")
    }
    at_least "$torch" 2 14 && standard=20
    if ! has "${compiler[0]}"; then
        need "a C++ compiler (${compiler[*]})" build-essential
    elif ! echo 'int main() {}' | "${compiler[@]}" -std=c++$standard -x c++ - -o "$tmp/probe" >/dev/null 2>&1; then
        need "a C++ compiler that knows C++$standard (${compiler[*]} does not)" build-essential
    fi
    has make || need make build-essential
    [[ -r $py_include/Python.h ]] || need "Python's headers ($py_include/Python.h)" python3-dev
    if [[ $mpi == yes ]]; then
        has mpicxx || need 'mpicxx (MPI)' libopenmpi-dev
        has mpirun || need 'mpirun (MPI)' openmpi-bin
    fi
    has tar || need tar tar
    if [[ $gpu == yes ]]; then
        nvcc=$(find_nvcc) || need "CUDA's compiler nvcc: set HOROVOD_CUDA_HOME, or use a -devel image"
        [[ -z $torch || -n $torch_cuda ]] || need "a torch built for CUDA ($torch is for CPU, but a GPU build is asked for)"
        [[ -z $tf || $tf_flavour == cuda ]] || need "a TensorFlow built for CUDA (this $tf is for CPU, but a GPU build is asked for)"
    fi
    if [[ $nccl == yes ]] && has "${compiler[0]}"; then
        for dir in "${HOROVOD_NCCL_INCLUDE:-}" "${HOROVOD_NCCL_HOME:+$HOROVOD_NCCL_HOME/include}" \
            "${nvcc:+${nvcc%/bin/nvcc}/include}"; do
            [[ -z $dir ]] || include+=("-I$dir")
        done
        # Its headers include CUDA's, so only look for the file.
        printf '#if !__has_include(<nccl.h>)\n#error none\n#endif\n' |
            "${compiler[@]}" "${include[@]}" -x c++ -E - >/dev/null 2>&1 || need 'nccl.h: set HOROVOD_NCCL_HOME'
    fi
    ((${#missing[@]} == 0)) && return
    complain 'needed to build Horovod, but missing:'
    printf '           - %s\n' "${missing[@]}" >&2
    ((${#packages[@]} == 0)) || complain "try: $(packages_command "${packages[@]}")"
    [[ $mpi == no || " ${missing[*]} " != *'(MPI)'* ]] || complain 'or build without MPI: --with-mpi no'
    exit $EX_NEED
}

check_basics() {
    { has flock && has setsid; } || die $EX_NEED "missing: flock and setsid. Try: $(packages_command util-linux)"
    [[ $has_pip == yes ]] || die $EX_NEED "missing: pip in $python. Try: $python -m ensurepip"
    if [[ $managed == yes && ${PIP_BREAK_SYSTEM_PACKAGES:-0} == 0 ]]; then
        die $EX_NEED "$python belongs to the operating system and refuses packages. Try: $python -m venv .venv, and --python .venv/bin/python"
    fi
}

# ---------------------------------------------------------------- checking

# Loading proves more than linking: a symbol can be missing at import only.
load() { # load FRAMEWORK FEATURE...
    (cd / && TF_CPP_MIN_LOG_LEVEL=3 timeout 600 "$python" - "$@") <<'LOAD'
import importlib
import sys

framework, *features = sys.argv[1:]
horovod = importlib.import_module("horovod." + framework)
lacking = [name for name in features if not getattr(horovod, name + "_built")()]
sys.exit("built without " + ", ".join(lacking) if lacking else 0)
LOAD
}

works() { # says nothing; what went wrong is in $tmp/*.check
    local features=(gloo) framework loads=() load code=0
    [[ $mpi == no ]] || features+=(mpi)
    [[ $nccl == no ]] || features+=(nccl)
    for framework in ${torch:+torch} ${tf:+tensorflow}; do
        load "$framework" "${features[@]}" >"$tmp/$framework.check" 2>&1 &
        loads+=($!)
    done
    for load in "${loads[@]}"; do
        wait "$load" || code=1
    done
    return $code
}

# Loading takes seconds, so what was seen to work is noted: the very files of this
# Horovod, torch and TensorFlow, by place, size and time.
note_works() {
    read_facts
    if mkdir -p -- "$cache/works" 2>/dev/null && [[ -w $cache/works ]]; then
        : >"$cache/works/$key.$fingerprint"
    fi
}

worked_before() { [[ -e $cache/works/$key.$fingerprint ]]; }

show_checks() {
    local file
    for file in "$tmp"/*.check; do
        complain "import horovod.$(basename "$file" .check):"
        tail -n 12 -- "$file" | cut -c 1-300 | sed 's/^/  | /' >&2
    done
}

# By this recipe with this key, or by someone else for these very frameworks.
is_installed() {
    [[ $horovod == "$version" ]] || return 1
    if [[ -n $horovod_key ]]; then
        [[ $horovod_key == "$key" ]]
    else
        [[ $gpu == no && (-z $torch || $horovod_torch == "$torch") && (-z $tf || $horovod_tf == "$tf") ]]
    fi
}

summary() { echo "Horovod $version for ${torch:+torch $torch}${torch:+${tf:+ and }}${tf:+TensorFlow $tf} with Gloo${mpi_text}${nccl_text}"; }

# ---------------------------------------------------------------- building

system_cmake() { # prints the path of a CMake that Horovod and Gloo accept
    local cmake text
    cmake=$(command -v "${HOROVOD_CMAKE:-cmake}") || return 1
    text=$("$cmake" --version 2>/dev/null) || return 1
    [[ $text =~ version\ ([0-9]+\.[0-9]+) ]] || return 1
    at_least "${BASH_REMATCH[1]}" 3 13 && ! at_least "${BASH_REMATCH[1]}" 4 0 && echo "$cmake"
}

# Tools of the build alone go into a folder of their own, ahead on the path of the
# build only: the user's packages stay as they are.
get_tools() {
    local wanted=('setuptools<80' wheel packaging 'cffi>=1.4' psutil cloudpickle pyyaml) pins=()
    cmake=$(system_cmake) || wanted+=('cmake>=3.13,<4')
    [[ ! -r $here/constraints.txt ]] || pins=(-c "$here/constraints.txt")
    logged 'build tools' "$python" -m pip install --quiet --disable-pip-version-check \
        --target "$tmp/tools" "${pins[@]}" "${wanted[@]}" || failed 'getting the build tools'
    [[ -n $cmake ]] || cmake=$tmp/tools/cmake/data/bin/cmake
    "$cmake" --version >>"$log" 2>&1 || failed "running $cmake"
}

get_source() {
    logged 'source' env PYTHONPATH="$tmp/tools" "$python" -m pip download --quiet --disable-pip-version-check \
        --no-deps --no-binary horovod --no-build-isolation --dest "$tmp" "horovod==$version" ||
        failed "fetching Horovod's source"
    local sdist=$tmp/horovod-$version.tar.gz
    echo "$SDIST_SHA256  $sdist" | sha256sum --check --quiet >>"$log" 2>&1 || failed "the check of Horovod's source (not the known $version)"
    mkdir "$tmp/source"
    tar -xzf "$sdist" -C "$tmp/source" --strip-components 1 >>"$log" 2>&1 || failed "unpacking Horovod's source"
}

# change FILE FROM TO: FROM is a sed pattern that the file must hold.
change() {
    local file=$tmp/source/$1
    if ! grep -qE -- "$2" "$file"; then
        echo "no line like '$2' in $1" >>"$log"
        failed "patching Horovod's source"
    fi
    sed -i -E -e "s|$2|$3|" -- "$file"
}

patch_source() {
    change CMakeLists.txt 'CMAKE_CXX_STANDARD 14' 'CMAKE_CXX_STANDARD 17'
    if [[ -n $torch ]] && at_least "$torch" 2 1; then
        local standard=17
        at_least "$torch" 2 14 && standard=20
        change horovod/torch/CMakeLists.txt 'CMAKE_CXX_STANDARD 14' "CMAKE_CXX_STANDARD $standard"
    fi
    # Its includes (highwayhash, farmhash) are not in TensorFlow's wheels.
    change horovod/tensorflow/CMakeLists.txt '^list\(APPEND TF_SOURCES .*xla_mpi_ops\.cc.*$' ''
    # Python 3.12 has no distutils.
    change horovod/torch/CMakeLists.txt 'from distutils.sysconfig import get_python_inc; print\(get_python_inc\(\)\)' \
        "import sysconfig; print(sysconfig.get_path('include'))"
    change horovod/runner/js_run.py 'from distutils.spawn import find_executable' \
        'from shutil import which as find_executable'
    if [[ $gpu == yes && -n $tf ]] && at_least "$tf" 2 21; then
        # TensorFlow no longer exports this helper: define it here, where Stream is known.
        change horovod/tensorflow/mpi_ops.cc '^GpuStreamHandle AsGpuStreamValue' 'static GpuStreamHandle AsGpuStreamValue'
        change horovod/tensorflow/mpi_ops.cc '^#endif // TENSORFLOW_VERSION >= 2011000000$' '&\
namespace stream_executor::gpu {\
static GpuStreamHandle AsGpuStreamValue(Stream* stream) {\
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\
}\
}'
    fi
    printf '"""What this Horovod was built as; written by horovod_gradcomp."""\n\nKEY = "%s"\n' "$key" \
        >"$tmp/source/horovod/gradcomp_recipe.py"
}

default_jobs() {
    local cores memory
    cores=$(nproc)
    memory=$(awk '/^MemAvailable:/ { print int($2 / 2000000) }' /proc/meminfo 2>/dev/null || true)
    [[ -z $memory ]] || ((memory >= cores)) || cores=$memory
    ((cores > 0)) || cores=1
    echo "$cores"
}

build() {
    check_needs
    say 'getting the source and the build tools'
    get_tools
    get_source
    patch_source
    local flags=(HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MXNET=1)
    if [[ -n $torch ]]; then flags+=(HOROVOD_WITH_PYTORCH=1); else flags+=(HOROVOD_WITHOUT_PYTORCH=1); fi
    if [[ -n $tf ]]; then flags+=(HOROVOD_WITH_TENSORFLOW=1); else flags+=(HOROVOD_WITHOUT_TENSORFLOW=1); fi
    if [[ $mpi == yes ]]; then flags+=(HOROVOD_WITH_MPI=1); else flags+=(HOROVOD_WITHOUT_MPI=1); fi
    jobs=${jobs:-$(default_jobs)}
    say "compiling, $jobs at a time (5 to 10 minutes on 2 cores)"
    # An outer make leaves its own flags in the environment.
    logged 'compiling' env -u MFLAGS -u MAKELEVEL -u HOROVOD_SKIP_COMPILE -u HOROVOD_LOCAL_VERSION \
        -u HOROVOD_WITH_MXNET -u HOROVOD_WITHOUT_GLOO -u HOROVOD_WITH_MPI -u HOROVOD_WITHOUT_MPI \
        -u HOROVOD_WITH_PYTORCH -u HOROVOD_WITH_TENSORFLOW \
        MAKEFLAGS="-j$jobs" PYTHONPATH="$tmp/tools" HOROVOD_CMAKE="$cmake" TF_CPP_MIN_LOG_LEVEL=3 "${flags[@]}" \
        "$python" -m pip wheel -v --disable-pip-version-check --no-deps --no-build-isolation \
        --wheel-dir "$tmp/wheel" "$tmp/source" || failed 'the build'
    wheel=$(echo "$tmp"/wheel/horovod-*.whl)
    [[ -f $wheel ]] || failed 'the build (no wheel was made)'
}

# ---------------------------------------------------------------- the kept wheel

find_kept() { # sets wheel when a whole one is kept
    wheel=
    [[ -d $kept ]] || return 1
    if (cd "$kept" && sha256sum --check --status SHA256SUMS) 2>/dev/null; then
        wheel=$(echo "$kept"/horovod-*.whl)
        [[ -f $wheel ]] && return
    fi
    say 'the kept wheel is damaged: building it again'
    wheel=
    return 1
}

keep_wheel() { # in one rename, so that no run ever sees half of it
    ((use_cache)) || return 0
    stage=$(mktemp -d "$cache/wheels/.stage.XXXXXX")
    cp -- "$wheel" "$stage/"
    (cd "$stage" && sha256sum horovod-*.whl >SHA256SUMS)
    chmod 755 "$stage"
    rm -rf -- "$kept"
    mv -T -- "$stage" "$kept"
    stage=
    wheel=$(echo "$kept"/horovod-*.whl)
}

install_wheel() {
    say 'installing'
    logged 'installing' "$python" -m pip install --disable-pip-version-check --no-deps --force-reinstall "$wheel" ||
        failed 'installing Horovod'
    # What Horovod itself needs at run time; what is there already stays.
    logged 'installing' "$python" -m pip install --disable-pip-version-check "$wheel" ||
        failed "installing what Horovod needs"
}

take_lock() {
    local start=$SECONDS
    exec {lock}>"$lock_file"
    if ! flock --nonblock "$lock"; then
        say 'another run is at work on the same wheel: waiting for it'
        until flock --timeout 1 "$lock"; do tick 'waiting' $((SECONDS - start)); done
        end_ticks
    fi
}

# ---------------------------------------------------------------- main

read_facts
[[ -n $torch || -n $tf ]] || die $EX_NO_FRAMEWORK "neither torch nor TensorFlow found in $python: install one first"
decide
make_key
if [[ $action == print-key ]]; then
    echo "$key"
    exit 0
fi
mpi_text=
[[ $mpi == no ]] || mpi_text=' and MPI'
nccl_text=
[[ $nccl == no ]] || nccl_text=' and NCCL'

tmp=$(mktemp -d "${TMPDIR:-/tmp}/horovod_gradcomp.XXXXXX")
log=$tmp/log
: >"$log"
cache=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/horovod_gradcomp
kept=$cache/wheels/$key

if is_installed && [[ $action != check ]] && worked_before; then
    say "$(summary) is installed and was seen to work: nothing to do"
    exit 0
fi
if is_installed && works; then
    note_works
    say "$(summary) is installed and works$([[ $action == check ]] || echo ': nothing to do')"
    exit 0
fi
if [[ $action == check ]]; then
    if is_installed; then
        show_checks
        die $EX_CHECK "$(summary) is installed, but does not work"
    fi
    die $EX_CHECK "$(summary) is not installed${horovod:+ (another Horovod $horovod is)}"
fi

check_basics
say "$(summary), Python $py_version"
[[ $mpi == yes || $with_mpi == no ]] || say 'MPI was not found: Gloo only'
if ! mkdir -p -- "$cache/wheels" 2>/dev/null || [[ ! -w $cache/wheels ]]; then
    say "cannot write to $cache: the wheel will not be kept"
    use_cache=0
    lock_file=$tmp/lock
else
    lock_file=$cache/wheels/$key.lock
fi
take_lock

read_facts # another run may have installed it while this one waited
if is_installed && { worked_before || works; }; then
    say 'installed by another run, and works: nothing to do'
    exit 0
fi

if ((use_cache)) && find_kept; then
    say 'using the kept wheel'
    install_wheel
    if works; then
        note_works
        say "done: $(summary)"
        exit 0
    fi
    show_checks
    say 'the kept wheel does not work here: building it again'
fi

build
install_wheel
if ! works; then
    show_checks
    die $EX_CHECK "Horovod was built, but does not work; the log of the build: $(keep_log)"
fi
note_works
keep_wheel
say "done: $(summary), in $(clock $SECONDS)"
