"""What each key of a checkpoint's config.json means to us, as data: read elsewhere, ignored (why), or refused (why).

A key in none of these lists is refused by name unless its value switches it off (null, false, 0 or empty): a key we do
not know may change the result, and a wrong answer is worse than a clear refusal.
"""

from __future__ import annotations

from collections.abc import Mapping

_ABOUT_THE_FILE = "describes the file, not the function"
_ABOUT_TRAINING = "only training reads it"
_ABOUT_OUTPUTS = "says what a call returns, not what it computes"
_ABOUT_TEXT = "the tokenizer and the generation settings decide it"
_SPLIT = "how another program splits the work; the result is the same"

IGNORED: Mapping[str, str] = {
    "architectures": _ABOUT_THE_FILE,
    "auto_map": "names the publisher's Python files; we run our own code",
    "transformers_version": _ABOUT_THE_FILE,
    "model_name": _ABOUT_THE_FILE,
    "name_or_path": _ABOUT_THE_FILE,
    "finetuning_task": _ABOUT_THE_FILE,
    "task_specific_params": _ABOUT_THE_FILE,
    "problem_type": _ABOUT_THE_FILE,
    "id2label": _ABOUT_THE_FILE,
    "label2id": _ABOUT_THE_FILE,
    "tokenizer_class": _ABOUT_TEXT,
    "bos_token_id": _ABOUT_TEXT,
    "pad_token_id": _ABOUT_TEXT,
    "sep_token_id": _ABOUT_TEXT,
    "decoder_start_token_id": _ABOUT_TEXT,
    "bad_words_ids": _ABOUT_TEXT,
    "prefix": _ABOUT_TEXT,
    "attention_dropout": _ABOUT_TRAINING,
    "initializer_range": _ABOUT_TRAINING,
    "aux_loss_alpha": _ABOUT_TRAINING,
    "seq_aux": _ABOUT_TRAINING,
    "router_aux_loss_coef": _ABOUT_TRAINING,
    "use_cache": "the cache is what this program is about",
    "return_dict": _ABOUT_OUTPUTS,
    "output_attentions": _ABOUT_OUTPUTS,
    "output_hidden_states": _ABOUT_OUTPUTS,
    "output_router_logits": _ABOUT_OUTPUTS,
    "chunk_size_feed_forward": _SPLIT,
    "ep_size": _SPLIT,
    "pretraining_tp": _SPLIT,
    "num_nextn_predict_layers": "extra layers that guess further tokens; their weights are skipped",
}

# Known to change the result, and not implemented: refused whatever their value, unless it is an off value.
REFUSED: Mapping[str, str] = {
    "index_topk": "sparse attention",
    "index_head_dim": "sparse attention",
    "index_n_heads": "sparse attention",
    "sliding_window": "sliding-window attention",
    "mlp_bias": "biases in the feed-forward layers",
    "pruned_heads": "removed heads",
    "attn_logit_softcapping": "capped scores",
    "final_logit_softcapping": "capped logits",
    "is_encoder_decoder": "an encoder",
    "add_cross_attention": "cross attention",
}

# (key, the only value that is supported, what another value would mean). An absent key has that value.
FIXED: tuple[tuple[str, object, str], ...] = (
    ("hidden_act", "silu", "another activation"),
    ("moe_layer_freq", 1, "implementations disagree about which layers have experts"),
)
FIXED_BY_FAMILY: Mapping[str, tuple[tuple[str, object, str], ...]] = {
    "deepseek_v2": (
        ("scoring_func", "softmax", "another router"),
        ("norm_topk_prob", False, "implementations disagree about normalised weights in this family"),
        ("rope_interleave", True, "this family always stores interleaved pairs"),
    ),
    "deepseek_v3": (
        ("scoring_func", "sigmoid", "another router"),
        ("topk_method", "noaux_tc", "another router"),
    ),
}

# Which keys the rope settings may hold, by kind; the kind's name and theta always.
ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor", "original_max_position_embeddings", "mscale", "mscale_all_dim"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings", "mscale", "mscale_all_dim"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "attention_factor",
        }
    ),
}
