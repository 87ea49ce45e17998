"""Fuzz a reader of strangers' bytes: `python -m tests.fuzz --target sse --seconds 60`.

Needs atheris (`pip install atheris`), which the project does not. What breaks a target is written to `out/fuzz`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = (
    "sse",
    "openai",
    "chats",
    "oip",
    "v1",
    "torchserve",
    "grpc",
    "documents",
    "message",
    "http1",
    "http2",
)
OUT = Path(__file__).resolve().parents[2] / "out" / "fuzz"


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one target; the process ends with it, and its exit code is 0 where nothing broke."""
    import atheris

    with atheris.instrument_imports(include=["quantdrift.sidecar", "multipart"]):
        from tests.fuzz.targets import TARGETS
    target, corpus = TARGETS[name], OUT / name
    corpus.mkdir(parents=True, exist_ok=True)
    for place, seed in enumerate(target.seeds):
        (corpus / f"seed-{place}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={OUT}/{name}-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, "-timeout=10", "-rss_limit_mb=2048", str(corpus)], target.run)
    atheris.Fuzz()


def main() -> int:
    """Fuzz what is asked for, each target in a process of its own; return how many broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=[*NAMES, "all"], default="all")
    parser.add_argument("--seconds", type=int, default=60)
    given = parser.parse_args()
    if given.target != "all":
        fuzz(given.target, given.seconds)
        return 0
    commands = [
        [sys.executable, "-m", "tests.fuzz", "--target", name, "--seconds", str(given.seconds)]
        for name in NAMES
    ]
    return sum(subprocess.run(command, check=False).returncode != 0 for command in commands)


if __name__ == "__main__":
    raise SystemExit(main())
