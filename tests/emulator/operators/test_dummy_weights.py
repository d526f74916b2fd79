"""With dummy weights, no file of weights is read. So a small machine can run a large model's
shapes.
"""

import json

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}

CODE = """
from dist_aclgraph.comm.groups import ALONE, RankGroups
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.models.dummy_weights import DummyCheckpoint
from dist_aclgraph.shapes.families import read_model_spec

def resident_gib():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096 / 2**30

before = resident_gib()
noted = []
device = torch.device("npu:0")
decoder = Decoder(
    read_model_spec({folder!r}), RankGroups(tp=ALONE, ep=ALONE),
    DummyCheckpoint(torch.bfloat16, device=device, quantises={quantises}), device=device,
    max_len=4096, note=noted.append,
)
torch.npu.synchronize()
print("JSON", json.dumps({{
    "noted_gib": sum(noted) / 2**30, "allocated_gib": torch.npu.memory_allocated() / 2**30,
    "resident_gib": resident_gib() - before,
}}))
"""


def load(run_script, tmp_path, *, quantises):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    code = CODE.format(folder=str(tmp_path), quantises=quantises)
    status, output = run_script(code, timeout_s=300, kernels="timed", hbm_mb=65536)
    assert status == 0, output
    return json.loads(output[output.index("JSON ") + 5 :].splitlines()[0])


def test_dummy_weights_are_counted_and_take_no_memory(run_script, tmp_path):
    told = load(run_script, tmp_path, quantises=False)
    assert 15 < told["noted_gib"] < 15.6  # 8.19 billion parameters
    assert told["allocated_gib"] >= told["noted_gib"]
    assert told["resident_gib"] < 1


def test_int8_takes_half(run_script, tmp_path):
    told = load(run_script, tmp_path, quantises=True)
    assert 8.5 < told["noted_gib"] < 9.5  # int8 halves all weights except embedding and head
    assert told["resident_gib"] < 1
