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


def test_a_reference_in_pytorch_without_pytorch_says_what_to_install() -> None:
    """The extra `cpu` installs no PyTorch: a person is told, without a traceback."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from quantdrift.core.config.schema import Model, Reference, Runtime\n"
        "from quantdrift.core.errors import OperatorError\n"
        "from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference\n"
        "for runtime in (Runtime.TORCH, Runtime.TRANSFORMERS):\n"
        "    reference = Reference(runtime=runtime, path='model', digest='sha256:0')\n"
        "    try:\n"
        "        open_reference(RuntimeRequest(model=Model(name='digits'), reference=reference))\n"
        "    except OperatorError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("needs PyTorch, which the extra `cpu` does not install: pip install torch") == 2
