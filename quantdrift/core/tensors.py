"""The datatypes of the Open Inference Protocol as numpy types."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BOOL": np.dtype("?"),
        "UINT8": np.dtype("u1"),
        "UINT16": np.dtype("<u2"),
        "UINT32": np.dtype("<u4"),
        "UINT64": np.dtype("<u8"),
        "INT8": np.dtype("i1"),
        "INT16": np.dtype("<i2"),
        "INT32": np.dtype("<i4"),
        "INT64": np.dtype("<i8"),
        "FP16": np.dtype("<f2"),
        "FP32": np.dtype("<f4"),
        "FP64": np.dtype("<f8"),
    }
)
"""Little-endian, as on the wire. BF16 (no numpy type) and BYTES (no fixed length) are missing."""
