"""What is read of an adapter is what peft merges, in each of peft's variants."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.weights.adapters.read import read_adapter
from tests.cpu.weights.adapters.oracle import PeftCase, assert_equals_merged, parts_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]

LINEARS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "attn.c_proj"],
    "falcon": ["query_key_value", "dense_h_to_4h"],
    "gpt_neox": ["query_key_value", "dense"],
    "deepseek_v2": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}


@pytest.fixture
def case(tmp_path):
    return lambda *args, **lora: PeftCase(tmp_path, *args, **lora)


def read(case, **how):
    return read_adapter(case.folder, case.modules, torch.float32, **how)


@pytest.mark.sampled(3)
@pytest.mark.slow("the first test imports peft and transformers")
@pytest.mark.parametrize("variant", LINEARS)
def test_linear_layers(case, variant):
    made = case(variant, target_modules=LINEARS[variant])
    adapter = read(made)
    assert assert_equals_merged(adapter, made) >= 4
    assert adapter.rank == 4


def test_embedding_and_head(case):
    made = case("llama", target_modules=["embed_tokens", "lm_head", "q_proj"])
    assert assert_equals_merged(read(made), made) == 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"rank_pattern": {"k_proj": 3, r"layers\.1\..*_proj": 2, "q_proj": 7}},  # sorted in files
        {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 1, r"layers.[01].*k_proj": 20}},
        {"use_rslora": True, "rank_pattern": {"k_proj": 3}, "alpha_pattern": {"k_proj": 1}},
        {"use_dora": True},
        {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "down_proj"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"layers_to_transform": [1]},
        {"trainable_token_indices": {"embed_tokens": [9, 3], "lm_head": [5]}},
    ],
    ids=lambda lora: "-".join(lora),
)
def test_options(case, lora):
    def change(model):
        for name, value in model.named_parameters():
            if value.requires_grad and "lora_A" not in name and "lora_B" not in name:
                value.data += 0.1 * torch.randn_like(value)

    given = {"target_modules": ["q_proj", "k_proj"], **lora}
    made = case("llama", change, **given)
    assert assert_equals_merged(read(made), made) >= 2


def test_fused_layers_with_magnitudes(case):
    for variant in ("phi3", "gpt2"):
        made = case(variant, target_modules=LINEARS[variant], use_dora=True)
        assert_equals_merged(read(made), made)


BANK = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_parameters_of_experts(case, variant):
    made = case(
        variant,
        target_modules=["q_proj"],
        target_parameters=BANK,
        rank_pattern={"experts.gate_up_proj": 3},
        alpha_pattern={"experts.down_proj": 11},
    )
    assert assert_equals_merged(read(made), made) >= 4


def saved(case):
    """The tensors of an adapter's file."""
    return load_file(case.folder / "adapter_model.safetensors")


def rewrite(case, tensors):
    save_file(tensors, case.folder / "adapter_model.safetensors")


def test_banks_in_other_layouts(case):
    made = case("qwen3_moe", target_modules=[], target_parameters=BANK, merge=False)
    before, tensors, experts = read(made), saved(made), 12
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        other = name.replace("lora_A", "lora_B")
        a, b = tensors[name], tensors[other]
        inner = b.view(len(b), -1, experts)  # [O, r, X]
        tensors[name] = inner.permute(2, 1, 0).reshape(-1, len(b)).contiguous()
        outer = a.view(experts, -1, a.shape[1])  # [X, r, I]
        tensors[other] = outer.permute(2, 1, 0).reshape(a.shape[1], -1).contiguous()
    rewrite(made, tensors)
    assert_same_sums(read(made), before)  # A and B of the transposed weight


def test_banks_with_one_matrix_for_all_experts(case):
    made = case("qwen3_moe", target_modules=[], target_parameters=BANK, merge=False)
    tensors = saved(made)
    for name, one in tensors.items():
        if "base_layer.lora_A" in name:
            tensors[name] = one[:4].clone()
        if "experts.lora_B" in name:
            tensors[name] = one[:, :4].clone()
    rewrite(made, tensors)
    bank = read(made).deltas["layers.0.mlp.experts"]
    assert torch.equal(bank[0].a[0], bank[0].a[11])
    assert not torch.equal(bank[0].b[0], bank[0].b[11])
    assert torch.equal(bank[2].b[0], bank[2].b[11])
    assert not torch.equal(bank[2].a[0], bank[2].a[11])


def assert_same_sums(adapter, other):
    assert {k: set(v) for k, v in adapter.deltas.items()} == {
        k: set(v) for k, v in other.deltas.items()
    }
    for layer, parts in adapter.deltas.items():
        for part, delta in parts.items():
            mine = other.deltas[layer][part]
            torch.testing.assert_close(delta.b.mT @ delta.a, mine.b.mT @ mine.a)


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        ("qwen3_moe", ("mlp.experts", "gate_proj", "up_proj", "down_proj")),
        ("mixtral", ("block_sparse_moe.experts", "w1", "w3", "w2")),
    ],
)
def test_experts_as_modules(case, variant, names):
    made = case(variant, target_modules=["q_proj"], merge=False, rank_pattern={names[2]: 2})
    tensors, want = saved(made), {}
    shape = made.modules.layers["layers.0.mlp.experts"]
    bank, *leaves = names
    for part, leaf in enumerate(leaves):
        inputs, outputs, rank = shape.inputs_of(part), shape.outputs[part], 2 if part == 1 else 4
        for expert in (0, 3):
            a, b = torch.randn(rank, inputs), torch.randn(outputs, rank)
            name = f"base_model.model.model.layers.0.{bank}.{expert}.{leaf}"
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            want[part, expert] = 6 / rank * b @ a
    rewrite(made, tensors)
    deltas = read(made).deltas["layers.0.mlp.experts"]
    for part in range(3):
        found = deltas[part].b.mT @ deltas[part].a
        assert len(found) == shape.experts
        for expert, one in enumerate(found):
            default = torch.zeros_like(one)
            torch.testing.assert_close(one, want.get((part, expert), default))


TIED = "llama_bias_tied_head_dim"


def test_biases_of_adapters(case):
    made = case(TIED, target_modules=["q_proj", "v_proj"], lora_bias=True)
    adapter = read(made)
    assert_equals_merged(adapter, made)
    for i in (0, 1):
        layer = f"layers.{i}.self_attn.qkv_proj"
        merged, base = (model.get_submodule(layer) for model in (made.merged, made.base))
        want = parts_of(base, merged.bias - base.bias)
        for part in (0, 2):
            torch.testing.assert_close(adapter.deltas[layer][part].bias, want[part])


def test_embeddings_of_a_tied_model(case):
    made = case(TIED, target_modules=["embed_tokens"], merge=False)
    assert set(read(made).deltas) == {"embed_tokens"}
    made = case(TIED, target_modules=["embed_tokens"], ensure_weight_tying=True, merge=False)
    deltas = read(made).deltas
    table, head = deltas["embed_tokens"][0], deltas["lm_head"][0]
    torch.testing.assert_close(table.a.t() @ table.b, head.b.t() @ head.a)
    made = case(TIED, target_modules=["q_proj"], modules_to_save=["embed_tokens"], merge=False)
    assert "lm_head" not in read(made).deltas


def test_token_rows_of_a_tied_model_change_its_head(case):
    made = case(TIED, target_modules=["q_proj"], trainable_token_indices=[9, 3], merge=False)
    deltas = read(made).deltas
    table, head = deltas["embed_tokens"][0], deltas["lm_head"][0]
    assert torch.equal(table.rows, head.rows)
    assert table.indices.tolist() == [3, 9]
    assert head.indices.tolist() == [3, 9]


def test_names_that_files_have(case):
    made = case("llama", target_modules=["q_proj", "gate_proj"], merge=False)
    want, tensors = read(made), saved(made)
    assert want.digest == read(made).digest
    for old, new in (
        ("base_model.model.", ""),
        ("base_model.model.model.", ""),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.", "base_model.model.base_model.model."),
        ("base_model.model.", "module.base_model.model._orig_mod."),
        ("lora_A.", "lora_A.default."),
        ("lora_A.", "lora_A.some-name."),
        (".lora_", ".base_layer.lora_"),
    ):
        rewrite(made, {name.replace(old, new): one for name, one in tensors.items()})
        assert read(made).digest == want.digest, (old, new)
    one = next(iter(tensors))
    rewrite(made, tensors | {one: tensors[one] + 1})
    assert read(made).digest != want.digest


def test_names_of_parts_that_checkpoints_fuse(case):
    made = case("phi3", target_modules=["o_proj"], merge=False)
    layer, tensors = "layers.0.self_attn.qkv_proj", saved(made)
    outputs, inputs = made.modules.layers[layer].outputs, made.modules.layers[layer].inputs
    a, b = torch.randn(4, inputs), torch.randn(outputs[1], 4)
    name = "base_model.model.model.layers.0.self_attn.k_proj"
    rewrite(made, tensors | {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
    (part, delta), *others = read(made).deltas[layer].items()
    assert part == 1
    assert not others
    torch.testing.assert_close(delta.b.t() @ delta.a, 1.5 * b @ a)


def test_parameters_that_are_stored_transposed(case):
    made = case("gpt2", target_modules=[], target_parameters=["attn.c_proj.weight"])
    assert assert_equals_merged(read(made), made) == 2


def test_archives_of_torch(case):
    made = case("llama", target_modules=["q_proj"], merge=False)
    want, tensors = read(made).digest, saved(made)
    (made.folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, made.folder / "adapter_model.bin")
    assert read(made).digest == want
    torch.save({"state_dict": tensors}, made.folder / "adapter_model.bin")
    assert read(made).digest == want


def test_other_dtypes(case):
    made = case("llama", target_modules=["q_proj"], merge=False)
    want, tensors = read(made), saved(made)
    for stored in (torch.float64, torch.float16, torch.bfloat16):
        rewrite(made, {name: one.to(stored) for name, one in tensors.items()})
        adapter = read_adapter(made.folder, made.modules, torch.bfloat16)
        delta = adapter.deltas["layers.0.self_attn.qkv_proj"][0]
        mine = want.deltas["layers.0.self_attn.qkv_proj"][0]
        assert delta.a.dtype == delta.b.dtype == torch.bfloat16
        torch.testing.assert_close(delta.b.float(), mine.b, rtol=1e-2, atol=1e-2)
    assert adapter.nbytes * 2 == want.nbytes
