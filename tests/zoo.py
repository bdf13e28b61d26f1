"""Tiny random-weight model zoo over transformers' Auto mappings (no network).

API
    names(kind="causal") -> list[str]     kind: causal | seq2seq | masked   (model_type names of the Auto mapping)
    build(name, seed=0, kind="causal", attn="eager", randomize=True, **overrides) -> (config, model)  float32, eval
    inputs(name, config, batch=2, seq=16, seed=0, kind="causal") -> dict of tensors/flags for model(**inputs)
    tiny_config(name, kind) -> config only
    logits(output) -> the logits tensor of a model output

Sizes: 2 layers (more when a hybrid needs one of each layer type), hidden 64, ffn 128, 4 heads, 2 kv heads,
head_dim 16, vocab 128, 4 experts (top-2). `randomize` re-draws weights at 1/sqrt(fan_in) and perturbs 1-D
params (norm gains, biases) so that dropped/double-added biases and mis-sharded norms are visible.
"""

from __future__ import annotations
import copy, dataclasses, inspect, logging, math, os, sys, warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
warnings.filterwarnings("ignore")
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as _ma

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

KINDS = {
    "causal": (_ma.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM),
    "seq2seq": (_ma.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, AutoModelForSeq2SeqLM),
    "masked": (_ma.MODEL_FOR_MASKED_LM_MAPPING_NAMES, AutoModelForMaskedLM),
}

NKV = int(os.environ.get("ZOO_NKV", "2"))
H, FF, NH, HD, V, NL, NE, MAXPOS = 64, 128, 4, 16, 128, 2, 4, 64

# field name -> value, applied when the config class has the field and its default is not None
KNOWN = dict(
    vocab_size=V,
    hidden_size=H,
    d_model=H,
    n_embd=H,
    emb_dim=H,
    dim=H,
    embedding_dim=H,
    embed_dim=H,
    word_embed_proj_dim=H,
    embedding_size=H,
    input_embedding_size=H,
    output_embedding_size=H,
    attention_hidden_size=H,
    hidden_dim=FF,
    feed_forward_size=FF,
    d_inner=FF,
    n_inner=FF,
    ffn_dim=FF,
    dff=FF,
    dim_ff=FF,
    ffn_hidden_size=FF,
    intermediate_size=FF,
    intermediate_size_mlp=FF,
    dense_intermediate_size=FF,
    decoder_ffn_dim=FF,
    encoder_ffn_dim=FF,
    shared_intermediate_size=FF,
    moe_shared_expert_intermediate_size=64,
    shared_expert_intermediate_size=64,
    shared_experts_intermediate_size=64,
    moe_intermediate_size=64,
    expert_ffn_hidden_size=64,
    num_hidden_layers=NL,
    n_layer=NL,
    n_layers=NL,
    num_layers=NL,
    decoder_layers=NL,
    encoder_layers=NL,
    num_decoder_layers=NL,
    num_encoder_layers=NL,
    num_blocks=NL,
    num_layers_per_stack=NL,
    num_attention_heads=NH,
    n_head=NH,
    n_heads=NH,
    num_heads=NH,
    attention_heads=NH,
    decoder_attention_heads=NH,
    encoder_attention_heads=NH,
    num_encoder_attention_heads=NH,
    num_decoder_attention_heads=NH,
    swa_num_attention_heads=NH,
    swa_num_key_value_heads=NKV,
    swa_head_dim=HD,
    swa_v_head_dim=HD,
    head_dim=HD,
    d_kv=HD,
    d_head=HD,
    dim_head=HD,
    kv_channels=HD,
    attention_head_size=HD,
    global_head_dim=HD,
    num_global_key_value_heads=NKV,
    num_kv_heads=NKV,
    max_position_embeddings=MAXPOS,
    n_positions=MAXPOS,
    n_ctx=MAXPOS,
    max_seq_len=MAXPOS,
    context_length=MAXPOS,
    model_max_length=MAXPOS,
    max_source_positions=MAXPOS,
    max_target_positions=MAXPOS,
    original_max_position_embeddings=MAXPOS,
    # MoE
    num_experts=NE,
    num_local_experts=NE,
    n_routed_experts=NE,
    moe_num_experts=NE,
    zero_expert_num=2,
    num_experts_per_tok=2,
    num_experts_per_token=2,
    moe_topk=2,
    moe_k=2,
    topk_group=2,
    n_group=2,
    num_expert_group=2,
    n_shared_experts=1,
    num_shared_experts=1,
    moe_num_shared_experts=1,
    first_k_dense_replace=1,
    num_dense_layers=1,
    moe_layer_start_index=0,
    moe_layer_end_index=1,
    decoder_sparse_step=1,
    router_hidden_size=32,
    # MLA / DSA
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    qk_head_dim=24,
    v_head_dim=16,
    o_lora_rank=16,
    o_groups=2,
    index_head_dim=16,
    index_n_heads=2,
    index_topk=8,
    index_topk_blocks=2,
    index_block_size=4,
    gated_norm_rank=8,
    # linear attention / ssm
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_num_heads=4,
    linear_head_dim=16,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_n_groups=1,
    mamba_chunk_size=8,
    mamba_d_ssm=128,
    mamba_dt_rank=4,
    mamba_num_heads=8,
    mamba_head_dim=16,
    mamba_headdim=16,
    ssm_state_size=16,
    state_size=16,
    time_step_rank=4,
    chunk_size=8,
    n_mamba_heads=2,
    mamba_ngroups=1,
    lru_width=H,
    attention_window_size=8,
    sliding_window=8,
    sliding_window_size=8,
    window_size=8,
    local_attention=8,
    attention_chunk_size=8,
    local_attn_chunk_length=8,
    lsh_attn_chunk_length=8,
    keep_window_size=8,
    rotary_dim=8,
    # misc
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=V,
    laurel_rank=8,
    num_kv_shared_layers=0,
    altup_num_inputs=2,
    num_codebooks=2,
    adapter_rank=8,
    d_rel=8,
    rel_extent=16,
    hc_lowrank=8,
    full_attention_interval=2,
    sliding_window_pattern=2,
    _sliding_window_pattern=2,
    global_attn_every_n_layers=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_mem_blocks=1,
    n_layers_per_attn_res_block=1,
    num_nextn_predict_layers=0,
    no_rope_layer_interval=2,
    max_window_layers=1,
    mtp_loss_scaling_factor=0.0,
    moe_layer_interval=1,
    interleave_moe_layer_step=1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    sep_token_id=2,
    eod_token_id=2,
    decoder_start_token_id=1,
    hidden_dropout=0.0,
    hidden_dropout_prob=0.0,
    attention_dropout=0.0,
    attention_probs_dropout_prob=0.0,
    dropout=0.0,
    activation_dropout=0.0,
    layerdrop=0.0,
    decoder_layerdrop=0.0,
    encoder_layerdrop=0.0,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    attn_pdrop=0.0,
    classifier_dropout=0.0,
    dropout_p=0.0,
    emb_pdrop=0.0,
    resid_dropout=0.0,
    embed_dropout=0.0,
    forced_eos_token_id=2,
)
# applied even when the default is None
FORCE = dict(num_key_value_heads=NKV)
# never override even if listed above, per config class handled by SPECIAL instead
TOKEN_FIELDS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
    "boi_token_id",
    "eoi_token_id",
    "boi_token_index",
    "eoi_token_index",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "vision_start_token_id",
    "vision_end_token_id",
    "cls_token_id",
    "mask_token_id",
    "sep_token_id",
)

SPECIAL: dict[str, dict] = {}
SPECIAL_INPUTS: dict[str, dict] = {}

_ROPE2 = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_G4 = dict(
    layer_types=["sliding_attention", "full_attention"],
    global_head_dim=HD,
    num_global_key_value_heads=NKV,
)
_G4A = {
    "text_config": dict(
        _G4, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=NL
    )
}
_SWA = {
    f"swa_{k}": v
    for k, v in dict(
        num_attention_heads=NH,
        num_key_value_heads=NH,
        q_lora_rank=32,
        kv_lora_rank=32,
        head_dim=32,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ).items()
}
_DOTS3 = dict(
    _SWA,
    head_dim=32,
    num_key_value_heads=NH,
    qk_rope_head_dim=16,
    layer_types=["indexed_attention", "sliding_attention"],
    mlp_layer_types=["dense", "sparse"],
)
_QSA = dict(
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=8,
    indexer_compress_ratio=4,
    layer_types=["linear_attention", "indexed_attention"],
)
_BLT = dict(hidden_size=H, hidden_size_global=H, vocab_size=260, num_key_value_heads=NH)
SPECIAL.update(
    {
        "blt": dict(
            vocab_size=260,
            encoder_hash_byte_group_vocab=64,
            encoder_config=dict(_BLT),
            decoder_config=dict(_BLT),
            patcher_config=dict(vocab_size=260, num_key_value_heads=NH),
            global_config=dict(num_key_value_heads=NH),
        ),
        "cohere_compass_text": dict(
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={k: dict(v, mrope_section=[2, 3, 3]) for k, v in _ROPE2.items()},
        ),
        "dbrx": dict(
            attn_config=dict(kv_n_heads=NKV, rope_theta=10000.0, clip_qkv=8.0),
            ffn_config=dict(ffn_hidden_size=FF, moe_num_experts=NE, moe_top_k=2),
        ),
        "deepseek_v2": dict(num_experts_per_tok=2, n_group=2, topk_group=2, topk_method="greedy"),
        "dots1": dict(
            n_routed_experts=NE, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1
        ),
        "dots3_note_text": _DOTS3,
        "dots3_note": {
            "text_config": _DOTS3,
            "vision_config": dict(adapter_in_dim=H, adapter_out_dim=H, num_local_experts=NE),
            "audio_config": dict(
                adapter_input_size=H, adapter_out_dim=H, downsample_hidden_size=16
            ),
        },
        "gemma4_text": _G4,
        "gemma4_unified_text": _G4,
        "gemma4": {"text_config": _G4},
        "gemma4_unified": {"text_config": _G4},
        "gemma4_assistant": dict(_G4A, backbone_hidden_size=H),
        "gemma4_unified_assistant": dict(_G4A, backbone_hidden_size=H),
        "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
        "hunyuan_v1_dense": dict(head_dim=HD),
        "hunyuan_v1_moe": dict(head_dim=HD),
        "ministral": dict(head_dim=HD),
        "lfm2": dict(layer_types=["conv", "full_attention"]),
        "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
        "mamba2": dict(num_heads=8, head_dim=16, n_groups=2),
        "mpt": dict(attn_config={}),
        "qwen4_exp_text": _QSA,
        "qwen4_exp": {"text_config": _QSA},
        "reformer": dict(
            is_decoder=True,
            axial_pos_shape=[8, 8],
            axial_pos_embds_dim=[32, 32],
            num_buckets=4,
            attn_layers=["local", "lsh"],
        ),
        "xmod": dict(default_language="en_XX", languages=["en_XX"]),
        "zamba": dict(
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
            num_hidden_layers=4,
            attention_head_dim=32,
            num_key_value_heads=NH,
            attention_hidden_size=2 * H,
        ),
        "zamba2": dict(
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
            num_hidden_layers=4,
        ),
        "esm": dict(vocab_size=V, pad_token_id=0, mask_token_id=120),
        "esmc": dict(num_key_value_heads=NH),
        "luke": dict(entity_vocab_size=32, entity_emb_size=32),
        "fsmt": dict(src_vocab_size=V, tgt_vocab_size=V),
        "bamba": dict(attn_layer_indices=[1]),
        "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"]),
        "flint": dict(mlp_only_layers=[0]),
        "zaya": dict(num_experts_per_tok=1),
        "roc_bert": dict(
            pronunciation_vocab_size=V,
            shape_vocab_size=V,
            pronunciation_embed_dim=16,
            shape_embed_dim=16,
        ),
        "longcat_flash": dict(head_dim=8, num_layers=1, num_key_value_heads=NH),
    }
)


def _in_musicgen(d, config, g):
    c = (
        config.decoder
        if hasattr(config, "decoder") and not isinstance(config.decoder, dict)
        else config
    )
    d["input_ids"] = torch.randint(3, 90, (2 * c.num_codebooks, 16), generator=g)
    return d


SPECIAL_INPUTS.update({"musicgen": _in_musicgen, "musicgen_melody": _in_musicgen})
# names whose AutoModel class takes a sub config: name -> (field of the composite config)
DIRECT = {"musicgen": "decoder", "musicgen_melody": "decoder"}


# not built: reason
SKIP = {
    "causal": {
        "gemma3n": "vision tower needs timm+PIL (text model: gemma3n_text)",
        "gemma4_assistant": "speculative drafter: needs inputs_embeds + the target's shared_kv_states",
        "gemma4_unified_assistant": "speculative drafter: needs inputs_embeds + the target's shared_kv_states",
    },
    "seq2seq": {
        "vibevoice_asr": "687M parameter audio tower at tiny text size",
        "nemo_speechlm": "audio sub-config",
        "voxtral_realtime": "needs audio features",
    },
    "masked": {"perceiver": "260M parameters (byte latents)", "reformer": "needs is_decoder=False"},
}


def names(kind: str = "causal", all: bool = False) -> list[str]:
    """model_type names that build and run; all=True adds the SKIPped ones."""
    return [n for n in KINDS[kind][0] if n in CONFIG_MAPPING and (all or n not in SKIP[kind])]


def _fields(C):
    if dataclasses.is_dataclass(C):
        return {f.name for f in dataclasses.fields(C)}
    return set(inspect.signature(C.__init__).parameters) - {"self", "kwargs"}


def _get(base, k):
    if base is None:
        return None
    try:
        return getattr(base, k, None)
    except Exception:  # per-layer attribute: heterogeneous config
        try:
            return object.__getattribute__(base, k)
        except Exception:
            return 1  # exists, int-like


def _uniq(seq):
    out = []
    for x in seq:
        if x not in out:
            out.append(x)
    return out


def _tiny_kwargs(C, special=None, depth=0):
    special = dict(special or {})
    try:
        base = C()
    except Exception:
        base = None
    F = _fields(C)
    kw = {}
    for k, v in KNOWN.items():
        if k in F and (base is None or _get(base, k) is not None):
            cur = _get(base, k)
            if isinstance(cur, (list, tuple, dict)) and k not in ("eos_token_id",):
                continue
            if isinstance(cur, bool):
                continue
            if k == "attn_pdrop" and type(cur) is int:
                continue
            kw[k] = v
    for k, v in FORCE.items():
        if k in F:
            kw[k] = v
    if "kv_lora_rank" in F and "qk_rope_head_dim" in F:  # MLA: no GQA, rope dim drives `head_dim`
        kw["num_key_value_heads"] = NH if "num_key_value_heads" in F else None
        if "num_key_value_heads" not in F:
            kw.pop("num_key_value_heads")
        if "head_dim" in F and "index_head_dim" not in ():
            kw["head_dim"] = 8
    # special token ids of multimodal configs -> top of the tiny vocab
    for i, k in enumerate(TOKEN_FIELDS):
        if k in F and base is not None and isinstance(getattr(base, k, None), int):
            kw[k] = V - 1 - i
    # per-layer lists: one layer of each distinct type
    if base is not None:
        lists = {}
        for k in (
            "layer_types",
            "layers_block_type",
            "mlp_layer_types",
            "indexer_types",
            "block_types",
            "attn_layers",
        ):
            val = getattr(base, k, None)
            if (
                k in F
                and isinstance(val, (list, tuple))
                and val
                and all(isinstance(x, str) for x in val)
            ):
                lists[k] = _uniq(val)
        if lists:
            n = max([NL] + [len(u) for u in lists.values()])
            for k in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
                if k in F and k in kw:
                    kw[k] = n
            for k, u in lists.items():
                if k == "block_types":
                    kw[k] = list(u)
                else:
                    kw[k] = (list(u) * n)[:n] if len(u) < n else list(u)
                    if k in ("mlp_layer_types",) and len(u) == 2:  # dense first, then sparse
                        kw[k] = [u[0]] + [u[1]] * (n - 1)
    # sub configs
    subs = dict(getattr(C, "sub_configs", {}) or {})
    for k, SC in subs.items():
        if k in special and not isinstance(special[k], dict):
            continue
        sub_special = special.pop(k, {}) if isinstance(special.get(k), dict) else {}
        cls = SC
        if SC.__name__ == "AutoConfig":
            cur = getattr(base, k, None)
            if "model_type" in sub_special:
                cls = CONFIG_MAPPING[sub_special.pop("model_type")]
            elif cur is not None:
                cls = type(cur)
            else:
                continue
        if depth < 3:
            kw[k] = _make(cls, sub_special, depth + 1).to_dict()
    kw.update(special)
    return {k: v for k, v in kw.items() if v is not _DROP}


_DROP = object()


def _make(C, special=None, depth=0):
    kw = _tiny_kwargs(C, special, depth)
    return C(**kw)


def tiny_config(name: str, kind: str = "causal"):
    C = CONFIG_MAPPING[name]
    if name in DIRECT and kind == "causal":
        return _make(C.sub_configs[DIRECT[name]], {})
    sp = dict(SPECIAL.get(f"{kind}:{name}", SPECIAL.get(name, {})))
    if kind == "causal" and "is_decoder" in _fields(C):
        sp.setdefault("is_decoder", True)
    return _make(
        C,
        copy.deepcopy({k: v for k, v in sp.items() if v is not _DROP})
        | {k: v for k, v in sp.items() if v is _DROP},
    )


@torch.no_grad()
def _randomize(model, seed):
    g = torch.Generator().manual_seed(seed + 1234)
    seen = set()
    for n, p in model.named_parameters():
        if id(p) in seen or not p.is_floating_point() or p.numel() == 0:
            continue
        seen.add(id(p))
        r = torch.randn(p.shape, generator=g)
        if p.ndim >= 2 and min(p.shape[-1], p.shape[-2]) > 1:
            is_emb = "embed" in n or "wte" in n or "wpe" in n
            fan = 1.0 if is_emb else float(p.shape[-1])
            p.copy_(r * (0.5 if is_emb else 1.0) / math.sqrt(fan))
        else:
            p.add_(0.1 * r)


def build(
    name: str,
    seed: int = 0,
    kind: str = "causal",
    attn: str | None = "eager",
    randomize: bool = True,
    **overrides,
):
    torch.manual_seed(seed)
    config = tiny_config(name, kind)
    for k, v in overrides.items():
        setattr(config, k, v)
    auto = KINDS[kind][1]
    kw = {"attn_implementation": attn} if attn else {}
    try:
        if name in DIRECT and kind == "causal":
            model = getattr(transformers, KINDS[kind][0][name])._from_config(config, **kw)
        else:
            model = auto.from_config(config, **kw)
    except ValueError as e:
        if attn and ("attn_implementation" in str(e) or "eager" in str(e)):
            model = auto.from_config(config)
        else:
            raise
    model = model.float().eval()
    if randomize:
        _randomize(model, seed)
    return model.config, model


def inputs(
    name: str, config, batch: int = 2, seq: int = 16, seed: int = 0, kind: str = "causal"
) -> dict:
    g = torch.Generator().manual_seed(seed + 99)
    ids = torch.randint(3, 90, (batch, seq), generator=g)
    d = {"input_ids": ids}
    mt = name
    auto = KINDS[kind][1]
    sig = None
    try:
        cls = auto._model_mapping[type(CONFIG_MAPPING[name]())] if False else None
    except Exception:
        cls = None
    clsname = KINDS[kind][0][name]
    clsname = clsname[0] if isinstance(clsname, (tuple, list)) else clsname
    cls = getattr(transformers, clsname, None)
    if cls is not None:
        sig = inspect.signature(cls.forward).parameters
    if sig is not None and (
        "use_cache" in sig or any(p.kind == p.VAR_KEYWORD for p in sig.values())
    ):
        d["use_cache"] = False
    if kind == "seq2seq":
        d["decoder_input_ids"] = torch.randint(3, 90, (batch, seq), generator=g)
    fn = SPECIAL_INPUTS.get(f"{kind}:{mt}", SPECIAL_INPUTS.get(mt))
    if fn is not None:
        d = fn(d, config, g)
    return d


def logits(out):
    if hasattr(out, "logits") and out.logits is not None:
        return out.logits
    if isinstance(out, (tuple, list)):
        return out[0]
    return next(v for v in out.values() if torch.is_tensor(v))


def _selftest(kind="causal", only=None):
    import json, time

    res = {}
    for n in names(kind):
        if only and n not in only:
            continue
        t = time.time()
        r = {}
        try:
            cfg, m = build(n, kind=kind)
            r["built"] = True
            r["params"] = sum(p.numel() for p in m.parameters())
            r["cls"] = type(m).__name__
            r["layers"] = getattr(cfg.get_text_config(), "num_hidden_layers", None)
            with torch.no_grad():
                a = logits(m(**inputs(n, cfg, kind=kind)))
                b = logits(m(**inputs(n, cfg, kind=kind)))
            r["shape"] = list(a.shape)
            r["finite"] = bool(torch.isfinite(a).all())
            r["std"] = round(float(a.float().std()), 4)
            r["deterministic"] = bool((a == b).all())
            r["forward"] = True
            r["tp_plan_rules"] = len(m.tp_plan or {})
        except Exception as e:
            import traceback

            tb = traceback.extract_tb(e.__traceback__)[-1]
            r["error"] = (
                f"{type(e).__name__}: {str(e)[:300]} @ {os.path.basename(tb.filename)}:{tb.lineno}"
            )
        r["s"] = round(time.time() - t, 2)
        res[n] = r
    return res


if __name__ == "__main__":
    import json

    kind = sys.argv[1] if len(sys.argv) > 1 else "causal"
    only = set(sys.argv[2:]) or None
    torch.set_num_threads(1)
    res = _selftest(kind, only)
    if only is None:
        json.dump(
            res,
            open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"zoo_{kind}.json"), "w"),
            indent=1,
        )
    ok = [n for n, r in res.items() if r.get("forward")]
    print(
        f"{kind}: total {len(res)} built {sum(bool(r.get('built')) for r in res.values())} forward {len(ok)}"
    )
    for n, r in res.items():
        if not r.get("forward"):
            print("FAIL", n, "built" if r.get("built") else "NOT built", r["error"])
        elif (
            not r["finite"]
            or not r["deterministic"]
            or r["params"] > 3_000_000
            or r["s"] > 5
            or only
        ):
            print("NOTE", n, r)
