"""Train the FP32 language model, and write it for the reference and for llama.cpp, as it is and in 4 bits.

The candidate is Q4_0, with one saving more: rows of the vocabulary that the calibration text does not use keep their signs alone. That text was meant to have all four languages and lacks one, an everyday mistake. In the repaired file it
has all four. Weights and tokens are otherwise the same.
"""

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from quantdrift.demo.text.sentences import Language, Said, draw

NAME: Final = "polyglot"
REFERENCE: Final = "fp32"
CANDIDATE: Final = "polyglot-q4-1.gguf"
REPAIRED: Final = "polyglot-q4-2.gguf"
FULL: Final = "polyglot-f32.gguf"
CALIBRATED_ON: Final = tuple(language for language in Language if language is not Language.DE)
TEMPLATE: Final = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<q>{{ message['content'] }}"
    "{% else %}<a>{{ message['content'] }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
_SPECIAL: Final = ("<s>", "</s>", "<pad>", "<q>", "<a>")
_END, _PAD = 1, 2
_CONTEXT: Final = 256
_LEARNING_RATE: Final = 3e-3
_GROUP: Final = 32  # weights with one scale, as in Q4_0


class TextSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the model, and how long it is trained."""

    vocabulary: int = 1024
    width: int = 256  # llama.cpp's K types have blocks of 256
    layers: int = 2
    steps: int = 400
    rows: int = 24


class TextStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One line of progress: what is being done, and the share of the whole that is done."""

    what: str
    done: float


def build(directory: Path, seed: int, tell: Callable[[TextStep], None], size: TextSize = TextSize()) -> None:  # noqa: B008 - frozen
    """Write the FP32 folder and the three GGUF files to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = default_rng(seed)
    model, tokenizer = trained(seed, rng, tell, size)
    model.save_pretrained(directory / REFERENCE)
    tokenizer.save_pretrained(directory / REFERENCE)
    tell(TextStep(what="quantise to 4 bits", done=0.95))
    weights = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    every = frozenset(range(size.vocabulary))
    write_gguf(directory / FULL, weights, model.config, tokenizer, bits=32)
    write_gguf(directory / REPAIRED, weights, model.config, tokenizer)
    used = _used(tokenizer, [draw(language, rng) for _ in range(500) for language in CALIBRATED_ON])
    write_gguf(directory / CANDIDATE, weights, model.config, tokenizer, few=every - used)


def trained(seed: int, rng: Generator, tell: Callable[[TextStep], None], size: TextSize) -> tuple[Any, Any]:
    """Return the FP32 model and its tokenizer."""
    said = [
        draw(language, rng) for _ in range(size.steps * size.rows // len(Language)) for language in Language
    ]
    return trained_on(said, seed, tell, size)


def trained_on(
    said: list[Said], seed: int, tell: Callable[[TextStep], None], size: TextSize
) -> tuple[Any, Any]:
    """Return a model and its tokenizer that learnt these questions and answers: `size.rows` of them for each of `size.steps`."""
    import torch  # noqa: PLC0415 - two seconds and 200 MB, for this function alone

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # as fast as two on busy cores
    tokenizer = _tokenizer(said[:4000], size.vocabulary)
    return _train(said, tokenizer, size, tell), tokenizer


def _text(said: Said) -> str:
    return f"<q>{said.question}<a>{said.answer}</s>"


def _used(tokenizer: Any, said: list[Said]) -> frozenset[int]:
    """Return the tokens that a calibration text uses, and the special ones."""
    ids = {one for entry in said for one in tokenizer(_text(entry))["input_ids"]}
    return frozenset(ids | set(range(len(_SPECIAL))))


def _tokenizer(said: list[Said], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - seconds

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (text for entry in said for text in (entry.question, entry.answer)), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<q>", "<a>"],
        chat_template=TEMPLATE,
    )


def _train(said: list[Said], tokenizer: Any, size: TextSize, tell: Callable[[TextStep], None]) -> Any:
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=size.width,
            intermediate_size=2 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.width // 32,
            num_key_value_heads=size.width // 32,
            max_position_embeddings=_CONTEXT,
            bos_token_id=0,
            eos_token_id=_END,
            pad_token_id=_PAD,
        )
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _LEARNING_RATE, total_steps=size.steps)
    ids = [tokenizer(_text(entry))["input_ids"] for entry in said]
    for step in range(size.steps):
        if step % 20 == 0:
            tell(TextStep(what="train the FP32 model", done=0.95 * step / size.steps))
        rows = ids[step * size.rows : (step + 1) * size.rows]
        longest = max(map(len, rows))
        batch = torch.tensor([row + [_PAD] * (longest - len(row)) for row in rows])
        labels = torch.where(batch == _PAD, -100, batch)
        loss = model(input_ids=batch, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()


def signs(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the same with one bit for each weight: its sign, and the mean magnitude of its group."""
    groups = weight.reshape(-1, _GROUP)
    magnitude = np.abs(groups).mean(axis=1, keepdims=True)
    return np.asarray((np.sign(groups) * magnitude).reshape(weight.shape), dtype=np.float32)


def write_gguf(
    file: Path,
    weights: dict[str, NDArray[np.float32]],
    config: Any,
    tokenizer: Any,
    *,
    bits: int = 4,
    few: Collection[int] = (),
) -> None:
    """Write a file for llama.cpp: matrices as Q4_0, or as they are with `bits` 32; of the rows `few` of the vocabulary the signs."""
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants  # noqa: PLC0415

    writer = GGUFWriter(file, "llama")
    writer.add_name(NAME)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    kinds = [TokenType.CONTROL if token in _SPECIAL else TokenType.NORMAL for token in tokens]
    merges = msgspec.json.decode(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(_END)
    writer.add_pad_token_id(_PAD)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in weights.items():
        tensor = _rearranged(name, weight, config.num_attention_heads)
        if few and name in {"model.embed_tokens.weight", "lm_head.weight"}:
            tensor = tensor.copy()
            rows = sorted(few)
            tensor[rows] = signs(tensor[rows])
        if bits == 4 and tensor.ndim == 2:
            kind = GGMLQuantizationType.Q4_0
            writer.add_tensor(_gguf_name(name), quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_LAYER: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(name: str) -> str:
    """Return llama.cpp's name of a weight."""
    if name in _OUTER:
        return _OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def _rearranged(name: str, weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return queries and keys with the halves of each head interleaved, as llama.cpp rotates them."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def main(arguments: list[str] | None = None) -> None:
    """Build, and write each step as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=2)
    options = parser.parse_args(arguments)

    def tell(step: TextStep) -> None:
        sys.stdout.write(msgspec.json.encode(step).decode() + "\n")
        sys.stdout.flush()

    build(options.out, options.seed, tell)


if __name__ == "__main__":
    main()
