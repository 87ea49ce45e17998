"""Run every benchmark: `python -m benchmarks [--quick]`."""

import subprocess
import sys
from pathlib import Path

_RUNS = 'if __name__ == "__main__":'


def main() -> int:
    """Run each in a process of its own; return 1 if one could not finish."""
    here = Path(__file__).parent
    names = sorted(
        [path.stem for path in here.glob("*.py") if path.stem != "__main__" and _RUNS in path.read_text()]
        + [path.parent.name for path in here.glob("*/__main__.py")]
    )
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        if subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=False
        ).returncode:
            failed.append(name)
    if failed:
        print("could not finish: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
