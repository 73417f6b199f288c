"""A Llama with a byte-level BPE as a GGUF file, as llama.cpp reads it; weights in float32.

llama.cpp rotates neighbouring axes of a head against each other, transformers the axes of its two halves. So the rows
of query and key projections, and their biases, are reordered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from torch import Tensor
from transformers import PreTrainedModel

from selector.files import atomically


def write_gguf(model: PreTrainedModel, tokenizer: Any, path: Path) -> None:
    """Write the file; a file that exists is replaced.

    Args:
        model: a Llama, perhaps with biases in its attention.
        tokenizer: a fast one, byte-level BPE.
    """
    config: Any = model.config
    with atomically(path) as partial:
        writer = gguf.GGUFWriter(partial, "llama")
        _add_sizes(writer, config)
        _add_tokenizer(writer, tokenizer)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if "q_proj" in name or "k_proj" in name:
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                tensor = _interleaved(tensor, heads)
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.float().contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rows, or numbers of a bias, of each head: those of its halves in turn."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    special, kinds = set(tokenizer.all_special_ids), gguf.TokenType
    types = [kinds.CONTROL if token in special else kinds.NORMAL for token in range(len(tokenizer))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
