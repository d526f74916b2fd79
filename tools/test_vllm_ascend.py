"""``make test-vllm-ascend``: run vllm-ascend and our engine on the emulated NPU, and compare their
greedy tokens.

Each engine runs in its own process, which starts this script with the name of the engine. The
packages of vLLM are in their own virtual environment (``make setup-vllm``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny-qwen3"
PATCH = ROOT / "emulator" / "for_vllm_ascend"
LENGTHS = (1, 5, 60, 129, 200)  # lengths of the prompts in tokens; a KV block has 128 tokens
NUM_TOKENS = 24
SIZES = [1, 2, 4, 8]
TIMEOUT_S = 1800
# The caches of compiled graphs are disabled: vllm-ascend is made for torch 2.10, and torch 2.13
# cannot cache graphs of vllm-ascend's compiler.
VARIABLES = ("HF_HUB_OFFLINE=1", "TORCHINDUCTOR_AUTOGRAD_CACHE=0", "VLLM_DISABLE_COMPILE_CACHE=1")
# The metadata that installed packages would have. With this metadata, vLLM finds the plugins of a
# work tree, and transformers finds a version of torchvision, although torchvision is a mock (see
# PATCH).
INSTALLED = {
    "vllm_ascend": """[vllm.platform_plugins]
ascend = vllm_ascend:register
[vllm.general_plugins]
ascend_model = vllm_ascend:register_model
ascend_model_loader = vllm_ascend:register_model_loader
emulated_npu = sitecustomize:register
""",
    "torchvision": "",
}


@dataclass(frozen=True)
class Peer:
    """vllm-ascend's sources, and the environment in which they run.

    Attributes:
        checkout: absolute path of a work tree of vllm-ascend.
        environment: absolute path of the virtual environment of vLLM.
    """

    checkout: Path
    environment: Path

    def prepare(self) -> None:
        """Write files that an installation of vllm-ascend would create: metadata, and build
        information.
        """
        write_metadata(self.environment / "metadata")
        info = self.checkout / "vllm_ascend" / "_build_info.py"
        info.write_text("__device_type__ = 'A2'\n")

    def command(self, arguments: Sequence[str], settings: Mapping[str, str]) -> list[str]:
        """Return the command that runs Python on the emulated NPU.

        Args:
            arguments: the arguments of Python.
            settings: the settings of the emulator.
        """
        python = str(self.environment / "bin" / "python")
        metadata, sources = self.environment / "metadata", self.environment / "vllm"
        paths = (PATCH, metadata, self.checkout, sources, ROOT)
        given = [word for setting in settings.items() for word in ("--set", "=".join(setting))]
        emulated = ["-m", "dist_aclgraph.device.emulator", "run", *given, "--", python]
        return [*_environment(paths), python, *emulated, *arguments]


def _environment(paths: Sequence[Path]) -> list[str]:
    return ["env", "PYTHONPATH=" + os.pathsep.join(map(str, paths)), *VARIABLES]


def prompts() -> list[list[int]]:
    """Return prompts of several lengths, as token ids of the tiny model."""
    return [[3 + (7 * i + 31 * n) % 800 for i in range(n)] for n in LENGTHS]


def our_tokens(tp: int) -> list[list[int]]:
    from dist_aclgraph import LLM, SamplingParams

    with LLM(str(ROOT / "configs" / "tiny-qwen3.yaml"), tensor_parallel_size=tp) as llm:
        return generate(llm, SamplingParams)


def peer_tokens(tp: int) -> list[list[int]]:
    vllm = importlib.import_module("vllm")  # installed only in vLLM's environment
    llm = vllm.LLM(
        model=str(MODEL),
        dtype="bfloat16",
        tensor_parallel_size=tp,
        max_model_len=512,
        max_num_seqs=max(SIZES),
        max_num_batched_tokens=512,
        block_size=128,
        num_gpu_blocks_override=128,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES},
    )
    return generate(llm, vllm.SamplingParams)


def generate(llm: Any, params: Any) -> list[list[int]]:
    """Call ``generate`` of one of the engines. Both engines have vLLM's interface."""
    given = [{"prompt_token_ids": ids} for ids in prompts()]
    greedy = params(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(given, greedy)]


def run(command: Sequence[str]) -> list[list[int]]:
    """Run an engine in another process. Return the tokens that the engine generates."""
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
    )
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("TOKENS "))
    tokens: list[list[int]] = json.loads(line.removeprefix("TOKENS "))
    return tokens


def differences(got: list[list[int]], want: list[list[int]]) -> list[str]:
    """Return a line for each prompt whose outputs differ."""
    return [
        f"  prompt of {n} tokens: vllm-ascend {a}, ours {b}"
        for n, a, b in zip(LENGTHS, got, want, strict=True)
        if a != b
    ]


def write_metadata(folder: Path) -> None:
    """Write the metadata of packages that are used, but not installed."""
    for name, entry_points in INSTALLED.items():
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)


def main(arguments: Sequence[str]) -> int:
    """Compare the engines for each number of ranks, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.test_vllm_ascend")
    parser.add_argument("checkout", type=Path, help="a work tree of vllm-ascend")
    parser.add_argument("environment", type=Path, help="the virtual environment of vLLM")
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 2], help="numbers of ranks")
    given = parser.parse_args(arguments)
    peer = Peer(given.checkout.absolute(), given.environment.absolute())
    peer.prepare()
    is_good = True
    for tp in given.tp:
        want = run([*_environment([ROOT]), sys.executable, __file__, "ours", str(tp)])
        got = run(peer.command([__file__, "peer", str(tp)], {}))
        differing = differences(got, want)
        is_good &= not differing
        equal = len(want) - len(differing)
        print("\n".join([f"TP {tp}: {equal} of {len(want)} outputs are equal", *differing]))
    return not is_good


if __name__ == "__main__":
    if sys.argv[1:2] in (["ours"], ["peer"]):
        tokens = {"ours": our_tokens, "peer": peer_tokens}[sys.argv[1]](int(sys.argv[2]))
        print("TOKENS", json.dumps(tokens))
    else:
        sys.exit(main(sys.argv[1:]))
