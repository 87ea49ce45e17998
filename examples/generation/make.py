"""`python -m examples.generation.make`: train the small language model that `config.toml` names, beside it.

Tokenizer and model learn the text of this project's licence; nothing is downloaded. It takes some seconds.
"""

from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

FOLDER: Final = "reference"
_VOCABULARY: Final = 512
_LENGTH: Final = 64
_STEPS: Final = 100
_ROWS: Final = 16
_TEMPLATE: Final = (
    "{% for tool in tools or [] %}<s>tool: {{ tool['function']['name'] }}</s>{% endfor %}"
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def make(directory: Path, *, steps: int = _STEPS) -> Path:
    """Train for so many steps, write the folder `reference` to `directory`, and return it."""
    disable_progress_bar()
    torch.set_num_threads(1)  # where others compute too, two threads wait for each other ten times as long
    texts = _texts()
    tokenizer = _tokenizer(texts)
    model = _model(len(tokenizer))
    stream = torch.tensor([one for text in texts for one in (0, *tokenizer(text)["input_ids"], 1)])
    _train(model, stream, steps)
    return save(directory / FOLDER, model, tokenizer)


def save(folder: Path, model: Any, tokenizer: Any) -> Path:
    """Write both as `save_pretrained` does, and return the folder."""
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def _texts() -> list[str]:
    """Return paragraphs of a text that stays as it is: another text is another model."""
    text = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")
    return [part for part in text.split("\n\n") if len(part) > 80]


def _tokenizer(texts: list[str]) -> Any:
    """Return a byte-level BPE tokenizer that was trained on these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=_TEMPLATE,
    )


def _model(n_tokens: int) -> Any:
    """Return a small Llama with random weights."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=n_tokens,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM computes heads of 32 and more on a CPU
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def _train(model: Any, stream: torch.Tensor, steps: int) -> None:
    """Train on parts of one long text, by steps and not by time: the same everywhere."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        begins = torch.randint(0, len(stream) - _LENGTH, (_ROWS,), generator=generator).tolist()
        batch = torch.stack([stream[begin : begin + _LENGTH] for begin in begins])
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()


if __name__ == "__main__":
    make(Path(__file__).parent)
