"""Ask a KServe server with KServe's own clients, in every way they know, and print what they understood as JSON.

Arguments: HTTP port, gRPC port, name of the header that carries the mark, mark.
"""

import asyncio
import base64
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

_ROWS = np.arange(8, dtype=np.float32).reshape(2, 4) / np.float32(4)
_TEXTS = np.array([b"plain", "größe".encode()], dtype=np.object_)


async def ask(http_port: int, grpc_port: int, header: str, mark: str) -> dict[str, Any]:
    """Return the answer of each way, by name; the mark of a request is `mark`, a hyphen and that name."""
    url, answers = f"http://127.0.0.1:{http_port}", {}
    async with InferenceRESTClient(RESTConfig(protocol="v1", retries=0)) as client:
        answers["v1"] = await client.infer(
            url, {"instances": _ROWS.tolist()}, "linear", headers={header: f"{mark}-v1"}
        )
    for coding, binary in (("json", False), ("binary", True)):
        async with InferenceRESTClient(RESTConfig(protocol="v2", retries=0)) as client:
            for model in ("linear", "words"):
                way = f"v2-{coding}-{model}"
                fields = {header: f"{mark}-{way}", "content-type": "application/json"}
                answer = await client.infer(url, _request(model, binary=binary), model, headers=fields)
                answers[way] = _outputs(answer)
        async with InferenceGRPCClient(f"127.0.0.1:{grpc_port}", retries=0) as client:
            for model in ("linear", "words"):
                way = f"grpc-{coding}-{model}"
                answer = await client.infer(
                    _request(model, binary=binary), headers=((header, f"{mark}-{way}"),)
                )
                answers[way] = _outputs(answer)
    return answers


def _request(model: str, *, binary: bool) -> InferRequest:
    values, name = (_ROWS, "x") if model == "linear" else (_TEXTS, "text")
    given = InferInput(name, list(values.shape), "FP32" if model == "linear" else "BYTES")
    given.set_data_from_numpy(values, binary_data=binary)
    parameters = {"binary_data_output": True} if binary else None
    return InferRequest(model, [given], request_id="7", parameters=parameters)


def _outputs(answer: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": output.name,
            "datatype": output.datatype,
            "shape": list(output.shape),
            "data": base64.b64encode(_data(output.as_numpy())).decode(),
        }
        for output in answer.outputs
    ]


def _data(values: Any) -> bytes:
    """Return an array's bytes, little-endian; texts have their length before them."""
    if values.dtype.kind not in "OSU":
        packed: bytes = np.ascontiguousarray(values).tobytes()
        return packed
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in values.ravel().tolist()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def main(arguments: Sequence[str]) -> None:
    """Ask, and print."""
    http_port, grpc_port, header, mark = arguments
    sys.stdout.write(json.dumps(asyncio.run(ask(int(http_port), int(grpc_port), header, mark))))


if __name__ == "__main__":
    main(sys.argv[1:])
