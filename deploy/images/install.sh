#!/bin/sh
# The environment of one image: /opt/quantdrift from the hashed lock of ROLE, without pip, and its SBOM. Run in a build
# stage, or by a test with another root: install.sh ROLE [WHEEL_DIR ENVIRONMENT SBOM_DIR]. Needs /build or $BUILD.
set -eu
role=$1 wheels=${2:-/wheel} environment=${3:-/opt/quantdrift} sbom=${4:-/usr/share/quantdrift} build=${BUILD:-/build}
here=$(dirname "$0")
python3=${PYTHON:-python3}
"$python3" -m venv --without-pip "$environment"
"$build/bin/python" -m pip install --quiet --require-hashes --only-binary :all: --no-binary nkeys --no-build-isolation --no-deps \
  --ignore-installed --no-warn-script-location --prefix "$environment" --requirement "$here/$role.txt"
"$build/bin/python" -m pip --python "$environment/bin/python" install --quiet --no-deps --no-index "$wheels"/quantdrift-*.whl
"$build/bin/python" -m pip --python "$environment/bin/python" check
# The other packages' commands, the scripts that activate an environment, tests, and headers for compilers.
find "$environment/bin" -mindepth 1 ! -name 'python*' ! -name quantdrift -delete
rm -rf "$environment/include" "$environment/share/man"
mkdir -p "$sbom"
"$build/bin/python" -P "$here/sbom.py" "$environment/bin/python" "$sbom/sbom.cdx.json"
