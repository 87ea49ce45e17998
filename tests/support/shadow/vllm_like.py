"""A server around a real model of `transformers` that speaks as vLLM does, where its OpenAI-compatible API is concerned.

It is not vLLM, which is a gigabyte and takes a minute to start (`tests/servers/test_vllm.py` asks it): one request at a
time, greedy decoding alone, nothing streamed. What it answers has the form that vLLM's answers have: `prompt_logprobs` (id to logprob, rank, decoded token, the first place null), `echo`,
`logprobs` of completions and chats, `return_token_ids`, `return_tokens_as_token_ids`, `/tokenize`, errors, and -9999 in
place of minus infinity. Its embeddings are means of the last hidden layer. A model with `eyes` reads images in chats.
"""

import base64
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

_LEAST = -9999.0
_NOT_SAID = (_LEAST, 1_000_000)  # of a token that stands for a part of an image


class VllmLike:
    """What the server answers.

    Parameters
    ----------
    model, tokenizer
        Of `transformers`.
    name
        Of the model.
    takes_prompt_logprobs
        Whether it knows `prompt_logprobs`; else it has `echo` alone, and neither `/tokenize` nor `/detokenize`.
    max_model_len
        Most tokens of prompt and answer.
    end_id
        The token that ends an answer; None: the tokenizer's.
    eyes
        What an image shows, as vectors that the model reads in place of tokens : (tokens, width), for its bytes; None: it refuses images.

    Attributes
    ----------
    model
        As given.
    fails
        Statuses that the next requests are answered with.
    asked
        Paths and bodies of all requests.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "small",
        takes_prompt_logprobs: bool = True,
        max_model_len: int = 256,
        end_id: int | None = None,
        eyes: Callable[[bytes], torch.Tensor] | None = None,
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._name = name
        self._takes_prompt_logprobs = takes_prompt_logprobs
        self._max_model_len = max_model_len
        self._end_id = tokenizer.eos_token_id if end_id is None and tokenizer else end_id
        self._eyes = eyes
        self._shown: dict[bytes, range] = {}
        self._seen: list[torch.Tensor] = []  # a vector for each token above the vocabulary
        self.fails: list[int] = []
        self.asked: list[tuple[str, Any]] = []

    def answer(self, path: str, asked: Mapping[str, Any]) -> tuple[int, Any]:
        """Return status and document."""
        self.asked.append((path, asked))
        if self.fails:
            return self.fails.pop(0), {"error": {"message": "as it was told", "type": "x", "code": 0}}
        answers: dict[str, Callable[[Mapping[str, Any]], tuple[int, Any]]] = {
            "/v1/models": self._models,
            "/version": lambda _: (200, {"version": "0.0"}),
            "/v1/completions": self._completion,
            "/v1/chat/completions": self._chat,
            "/v1/embeddings": self._embeddings,
            **(
                {"/tokenize": self._tokenized, "/detokenize": self._spelt}
                if self._takes_prompt_logprobs
                else {}
            ),
        }
        return answers[path](asked) if path in answers else (404, {"detail": "Not Found"})

    @property
    def template(self) -> str:
        """The chat template."""
        return str(self._tokenizer.chat_template)

    @template.setter
    def template(self, template: str) -> None:
        self._tokenizer.chat_template = template

    def _models(self, _: Mapping[str, Any]) -> tuple[int, Any]:
        return 200, {"data": [{"id": self._name, "max_model_len": self._max_model_len, "root": "/there"}]}

    def _embeddings(self, asked: Mapping[str, Any]) -> tuple[int, Any]:
        texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
        if not all(texts):
            return 400, {"error": {"message": "an empty text", "code": 400}}
        vectors = []
        for text in texts:
            ids = torch.tensor([self._prompt({"prompt": text}, special=True)])
            with torch.inference_mode():
                hidden = self.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            vectors.append(torch.nn.functional.normalize(hidden.mean(dim=0), dim=0).tolist())
        data = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        return 200, {"model": self._name, "data": data[::-1]}

    def _tokenized(self, asked: Mapping[str, Any]) -> tuple[int, Any]:
        ids = self._prompt(asked, special=bool(asked.get("add_special_tokens", "prompt" in asked)))
        return 200, {"tokens": ids, "count": len(ids), "max_model_len": self._max_model_len}

    def _spelt(self, asked: Mapping[str, Any]) -> tuple[int, Any]:
        return 200, {"prompt": self._tokenizer.decode(asked["tokens"], clean_up_tokenization_spaces=False)}

    def _prompt(self, asked: Mapping[str, Any], *, special: bool) -> list[int]:
        if "messages" not in asked:
            return list(self._tokenizer(asked["prompt"], add_special_tokens=special)["input_ids"])
        return list(
            self._tokenizer.apply_chat_template(
                asked["messages"],
                tools=asked.get("tools"),
                add_generation_prompt=asked.get("add_generation_prompt", True),
                continue_final_message=asked.get("continue_final_message", False),
                return_dict=False,
                **(asked.get("chat_template_kwargs") or {}),
            )
        )

    def _prompt_with_images(self, asked: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a chat, those of images above the vocabulary."""
        images: list[bytes] = []
        messages = [dict(message) for message in asked["messages"]]
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "".join(_shown(part, images) for part in message["content"])
        ids = self._prompt({**asked, "messages": messages}, special=False)
        (mark,) = self._tokenizer("<pad>", add_special_tokens=False)["input_ids"]
        for image in images:
            place = ids.index(mark)
            ids[place : place + 1] = self._ids_of(image)
        return ids

    def _ids_of(self, image: bytes) -> range:
        """Return the tokens that stand for an image, the same each time."""
        if image not in self._shown:
            assert self._eyes is not None
            vectors = self._eyes(image)
            first = len(self._tokenizer) + len(self._seen)
            self._seen += list(vectors)
            self._shown[image] = range(first, first + len(vectors))
        return self._shown[image]

    def _read(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return what the model reads for these tokens."""
        n_known = len(self._tokenizer)
        if max(ids, default=0) < n_known:
            return {"input_ids": torch.tensor([ids])}
        table = self.model.get_input_embeddings().weight
        vectors = [table[one] if one < n_known else self._seen[one - n_known] for one in ids]
        return {"inputs_embeds": torch.stack(vectors)[None]}

    def _chat(self, asked: Mapping[str, Any]) -> tuple[int, Any]:
        parts = [part for message in asked["messages"] for part in _parts(message)]
        if self._eyes is None and parts:
            return 400, {
                "error": {"message": "At most 0 image(s) may be provided in one prompt.", "code": 400}
            }
        prompt = self._prompt_with_images(asked)
        ids, places = self._generated(prompt, int(asked.get("max_tokens", 16)))
        wanted = int(asked.get("top_logprobs", 0)) if asked.get("logprobs") else None
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": self._text(ids)},
            "finish_reason": self._reason(ids),
        }
        if wanted is not None:
            named = bool(asked.get("return_tokens_as_token_ids"))
            choice["logprobs"] = {
                "content": [
                    {
                        **self._token(one, place[one], named=named),
                        "bytes": list(self.spelt(one).encode()),  # of what is listed the name's
                        "top_logprobs": [
                            self._token(token, place[token], named=named) for token in _best(place, wanted)
                        ],
                    }
                    for one, place in zip(ids, places, strict=True)
                ]
            }
        document: dict[str, Any] = {"model": self._name, "choices": [choice]}
        if (wanted := asked.get("prompt_logprobs")) is not None:
            document["prompt_logprobs"] = [None, *_told(self, prompt, wanted)]
        if asked.get("return_token_ids"):
            choice["token_ids"] = ids
            document["prompt_token_ids"] = prompt
        document["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return 200, document

    def _completion(self, asked: Mapping[str, Any]) -> tuple[int, Any]:
        prompts = asked["prompt"]
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        rows = [
            self._prompt({"prompt": one}, special=True) if isinstance(one, str) else one for one in prompts
        ]
        n_more = int(asked.get("max_tokens", 16))
        if any(len(row) + max(n_more, 1) > self._max_model_len for row in rows):
            return 400, {"error": {"message": f"at most {self._max_model_len} tokens", "code": 400}}
        n_known = len(self._tokenizer)
        if any(not 0 <= one < n_known for row in rows for one in row):
            return 400, {"error": {"message": "a token id is out of vocabulary", "code": 400}}
        if "prompt_logprobs" in asked and not self._takes_prompt_logprobs:
            return 400, {"error": {"message": "prompt_logprobs: extra fields not permitted", "code": 400}}
        if n_more == 0 and not asked.get("echo"):
            return 400, {"error": {"message": "max_tokens must be at least 1", "code": 400}}
        answered = [self._generated(row, n_more) for row in rows]
        choices = [
            self._choice(asked, index, row, found)
            for index, (row, found) in enumerate(zip(rows, answered, strict=True))
        ]
        counts = {
            "prompt_tokens": sum(map(len, rows)),
            "completion_tokens": sum(len(ids) for ids, _ in answered),
        }
        return 200, {"model": self._name, "choices": choices, "usage": counts}

    def _choice(
        self,
        asked: Mapping[str, Any],
        index: int,
        row: list[int],
        found: tuple[list[int], list[dict[int, tuple[float, int]]]],
    ) -> dict[str, Any]:
        ids, generated = found
        choice: dict[str, Any] = {
            "index": index,
            "text": self._text(ids),
            "finish_reason": self._reason(ids),
        }
        if (wanted := asked.get("prompt_logprobs")) is not None:
            choice["prompt_logprobs"] = [None, *(_told(self, row, wanted))]
        if (wanted := asked.get("logprobs")) is not None:
            begin = 0 if asked.get("echo") else len(row)
            shown = (row + ids)[begin:]
            places = [None, *self._places(row)[1:], *generated][begin:]
            choice["logprobs"] = {
                "tokens": [self.spelt(one) for one in shown],
                "token_logprobs": [
                    None if place is None else place[one][0] for one, place in zip(shown, places, strict=True)
                ],
                "top_logprobs": [
                    None
                    if place is None
                    else {self.spelt(t): place[t][0] for t in [one, *_best(place, wanted)]}
                    for one, place in zip(shown, places, strict=True)
                ],
            }
        if asked.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": row}
        return choice

    def spelt(self, token: int) -> str:
        """Return a token's text."""
        text: str = self._tokenizer.decode([token])
        return text

    def places(self, ids: Sequence[int]) -> list[dict[int, tuple[float, int]]]:
        """Return log-probability and rank of every token at each place; of the first place nothing is known."""
        return self._places(ids)

    def _places(self, ids: Sequence[int]) -> list[dict[int, tuple[float, int]]]:
        with torch.inference_mode():
            logits = self.model(**self._read(ids), use_cache=False).logits[0, :-1]
        return [{}, *map(_ranked, logits)]

    def _generated(
        self, prompt: list[int], n_tokens: int
    ) -> tuple[list[int], list[dict[int, tuple[float, int]]]]:
        """Return tokens, each with what the model said when it took it: INT8 says other things in other company."""
        if not n_tokens:
            return [], []
        with torch.inference_mode():
            found = self.model.generate(
                **self._read(prompt),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                max_new_tokens=n_tokens,
                do_sample=False,
                eos_token_id=self._end_id,
                pad_token_id=2,
                output_logits=True,
                return_dict_in_generate=True,
            )
        n_new = len(found.logits)  # with vectors in place of tokens the prompt is not repeated
        return list(found.sequences[0, -n_new:].tolist()), [_ranked(one[0]) for one in found.logits]

    def _reason(self, ids: list[int]) -> str:
        return "stop" if ids and ids[-1] == self._end_id else "length"

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _token(self, token: int, told: tuple[float, int], *, named: bool) -> dict[str, Any]:
        text = f"token_id:{token}" if named else self.spelt(token)
        return {"token": text, "logprob": told[0], "bytes": list(text.encode())}


@contextmanager
def serving(server: VllmLike) -> Iterator[str]:
    """Serve in a thread; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as it is called there
            """Say nothing."""

        def _answer(self, asked: Any) -> None:
            status, document = server.answer(self.path, asked)
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def _ranked(logits: torch.Tensor) -> dict[int, tuple[float, int]]:
    """Return log-probability and rank of every token."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    order = logprobs.argsort(descending=True, stable=True).tolist()
    return {token: (max(float(logprobs[token]), _LEAST), 1 + n) for n, token in enumerate(order)}


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message that are not text."""
    content = message["content"]
    return [part for part in content if part["type"] != "text"] if isinstance(content, list) else []


def _shown(part: Mapping[str, Any], images: list[bytes]) -> str:
    """Return a part of a message as text, an image as a mark, and keep the image."""
    if part["type"] == "text":
        return str(part["text"])
    images.append(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
    return "<pad>"


def _best(place: Mapping[int, tuple[float, int]], wanted: int) -> list[int]:
    return [token for token, (_, rank) in place.items() if rank <= wanted]


def _told(server: VllmLike, row: Sequence[int], wanted: int) -> list[dict[str, Any]]:
    return [
        {
            str(token): {
                "logprob": place.get(token, _NOT_SAID)[0],
                "rank": place.get(token, _NOT_SAID)[1],
                "decoded_token": server.spelt(token) if token in place else "",
            }
            for token in dict.fromkeys([one, *_best(place, wanted)])
        }
        for one, place in zip(row[1:], server.places(row)[1:], strict=True)
    ]
