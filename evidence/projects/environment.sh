#!/usr/bin/env bash
# An environment for `python -m evidence projects`, which sees the packages of this project's, and has what public projects
# import besides: `environment.sh FOLDER [PYTHON]`, PYTHON of an environment with evidence/requirements.txt. One project also needs a
# checkout of dhruvdcoder/box-embeddings on its path.
set -euo pipefail
folder=$1; python=${2:-python}
packages="import sysconfig; print(sysconfig.get_path('purelib'))"
"$python" -m venv "$folder"
echo "import site; site.addsitedir('$("$python" -c "$packages")')" > "$("$folder/bin/python" -c "$packages")/parent.pth"
"$folder/bin/python" -m pip install --no-deps -r "$(dirname "$0")/requirements.txt"
