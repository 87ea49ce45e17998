"""The CUDA devices of this machine, as its driver reports them; ONNX Runtime's own list describes its build."""

import ctypes

_NAME_BYTES = 128


def cuda_devices() -> tuple[str, ...]:
    """Return the names of the CUDA devices that the driver shows to this process; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    names = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(_NAME_BYTES)
        succeeded = driver.cuDeviceGetName(name, _NAME_BYTES, index) == 0
        names.append(name.value.decode(errors="replace") if succeeded else f"device {index}")
    return tuple(names)


def driver_version() -> str:
    """Return the version of NVIDIA's driver, from its management library; empty without one."""
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    version = ctypes.create_string_buffer(_NAME_BYTES)
    succeeded = (
        management.nvmlInit_v2() == 0 and management.nvmlSystemGetDriverVersion(version, _NAME_BYTES) == 0
    )
    return version.value.decode(errors="replace") if succeeded else ""
