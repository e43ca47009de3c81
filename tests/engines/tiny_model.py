"""A Qwen2 of 150,000 random weights with a tokenizer, a chat template and sampling defaults of its
own: what a real engine needs of a model, in a second and a megabyte.

Its answers are noise, but the same noise every time, and the prompts are those of a real chat model.

    python tests/engines/tiny_model.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONTEXT = 512
"""Tokens. `max_position_embeddings` of the model."""

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
"""What generation_config.json says; none of it is an engine's own default."""

# In the manner of Qwen's templates. Tool arguments go through `tojson`: given as the JSON text that
# OpenAI's messages hold, instead of as an object, they would come out escaped twice.
CHAT_TEMPLATE = """\
{%- set start = namespace(text='', next=0) -%}
{%- if messages[0].role == 'system' -%}
{%- set start.text = messages[0].content -%}
{%- set start.next = 1 -%}
{%- endif -%}
{%- if start.text or tools -%}
<|im_start|>system
{{ start.text }}
{%- if tools %}
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{%- endif %}<|im_end|>
{% endif -%}
{%- set turn = namespace(last='') -%}
{%- for message in messages[start.next:] -%}
{%- if message.role not in ('user', 'assistant', 'tool') -%}
{{ raise_exception('Unexpected role: ' + message.role) }}
{%- endif -%}
{%- if message.role == turn.last and message.role != 'tool' -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- set turn.last = message.role -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. How are you today? I am fine, thank you.",
    "system user assistant tool name arguments type function parameters properties string object",
    '{"type": "function", "function": {"name": "weather", "parameters": {"city": "Oslo"}}}',
    "Wie geht es dir? Quelle heure est-il ? Сколько времени? 今日はいい天気です。",
] * 20

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""One token each, but part of the text, as in Qwen's tokenizers: parsers look for them there."""


_VOCABULARY = 512
_HIDDEN, _INNER, _LAYERS = 64, 128, 2


def make(folder: Path, heads: int = 4, seed: int = 0) -> Path:
    """Write the model into `folder` and return it. Half as many heads are twice as wide; `seed` draws the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    _write_weights(folder, heads, seed)
    _write_json(
        folder / "config.json",
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        dtype="float32",
        vocab_size=_VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        eos_token_id=_SPECIAL.index("<|im_end|>"),
        pad_token_id=_SPECIAL.index("<|endoftext|>"),
    )
    _write_json(
        folder / "generation_config.json",
        do_sample=True,
        eos_token_id=_SPECIAL.index("<|im_end|>"),
        **SAMPLING,
    )
    return folder


def make_adapter(folder: Path, heads: int = 4, seed: int = 0, rank: int = 4) -> Path:
    """Write a LoRA adapter for such a model into `folder`, as peft does, and return it. It changes the model's answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    noise = torch.Generator().manual_seed(seed)
    width = {"q_proj": _HIDDEN, "v_proj": _HIDDEN // heads * (heads // 2)}
    weights = {}
    for layer in range(_LAYERS):
        for module, out in width.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, _HIDDEN, generator=noise)
            weights[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=noise)
    save_file(weights, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    _write_json(
        folder / "adapter_config.json",
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=None,
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(width),
        fan_in_fan_out=False,
        inference_mode=True,
    )
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(_PLAIN),
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    bpe.add_tokens([AddedToken(text, normalized=False, special=False) for text in _PLAIN])
    bpe.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _write_weights(folder: Path, heads: int, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    noise = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise) * 0.02

    kv = _HIDDEN // heads * (heads // 2)
    weights = {
        "model.embed_tokens.weight": random(_VOCABULARY, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": random(_VOCABULARY, _HIDDEN),
    }
    for layer in range(_LAYERS):
        parts = {
            "input_layernorm.weight": torch.ones(_HIDDEN),
            "post_attention_layernorm.weight": torch.ones(_HIDDEN),
            "self_attn.q_proj.weight": random(_HIDDEN, _HIDDEN),
            "self_attn.q_proj.bias": torch.zeros(_HIDDEN),
            "self_attn.k_proj.weight": random(kv, _HIDDEN),
            "self_attn.k_proj.bias": torch.zeros(kv),
            "self_attn.v_proj.weight": random(kv, _HIDDEN),
            "self_attn.v_proj.bias": torch.zeros(kv),
            "self_attn.o_proj.weight": random(_HIDDEN, _HIDDEN),
            "mlp.gate_proj.weight": random(_INNER, _HIDDEN),
            "mlp.up_proj.weight": random(_INNER, _HIDDEN),
            "mlp.down_proj.weight": random(_HIDDEN, _INNER),
        }
        weights.update({f"model.layers.{layer}.{name}": value for name, value in parts.items()})
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _write_json(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(fields, indent=1))


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
