"""What a shadow worker loads."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


def test_a_shadow_worker_does_not_load_torch() -> None:
    """Replaying ONNX graphs takes no torch: 200 MB and two seconds."""
    script = (
        "import sys, quantdrift.shadow.worker; print(*sorted({'torch', 'scipy', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_only_one_module_knows_onnx_runtime() -> None:
    """The seam stands between the rest and the library."""
    script = "import sys, quantdrift.shadow.pipeline.assess, quantdrift.shadow.replay.replay; print('onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
