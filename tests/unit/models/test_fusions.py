"""The choice of the fused operators that a rank uses, and the report of this choice."""

from __future__ import annotations

from typing import Any

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.device.versions import DEFAULT, LINES
from dist_aclgraph.models.fusions import FUSIONS, Fusions
from dist_aclgraph.planning.chip import Chip

A2 = Chip("Ascend910B1", "9.1.0")
NOT_CHOSEN = "not in device.fusions"
# For each fused operator, a width that it accepts.
WIDTHS = {fusion.name: fusion.widths[0] if fusion.widths else 1024 for fusion in FUSIONS}


def decide(
    chosen: Any = "auto",
    chip: Chip = A2,
    line: str = DEFAULT,
    dtype: str = "bfloat16",
    **keys: Any,
) -> Fusions:
    config = make_config({"model": "m", "dtype": dtype, "device": {"fusions": chosen}, **keys})
    return Fusions.decide(config, chip, line)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("chip", [A2, Chip("Ascend910_9391", "9.0.0")])
def test_auto_uses_each_operator_on_supported_chips_and_versions(chip: Chip, line: str) -> None:
    fusions = decide(chip=chip, line=line)

    assert all(fusions.use(fusion.name, WIDTHS[fusion.name]) for fusion in FUSIONS)


@pytest.mark.parametrize(
    ("changes", "off"),
    [
        ({"chosen": "none"}, [NOT_CHOSEN] * 6),
        ({"chosen": ["norm_quant"]}, [None, *[NOT_CHOSEN] * 5]),
        ({"chosen": ["latent_prologue"]}, [*[NOT_CHOSEN] * 5, "needs nz_weights"]),
        ({"chosen": []}, [NOT_CHOSEN] * 6),
        ({"chip": Chip("Ascend310P3", "9.1.0")}, ["known on A2 and A3, not on Ascend310P3"] * 6),
        (
            {"chip": Chip("Ascend910B1", "8.3.0")},
            [f"CANN is 8.3.0; needs {v}" for v in ("8.5", "8.5", "8.5", "9.0", "8.5", "9.0")],
        ),
        (
            {"chip": Chip("Ascend910B1", "8.5.0")},
            [*[None] * 3, "CANN is 8.5.0; needs 9.0", None, "CANN is 8.5.0; needs 9.0"],
        ),
        ({"line": "2.9"}, ["torch_npu is 2.9; known in 2.10, 2.12, 2.13"] * 6),
        (
            {"dtype": "float16"},
            [
                None,
                "dtype is float16; takes bfloat16",
                *[None] * 3,
                "dtype is float16; takes bfloat16",
            ],
        ),
        (
            {"kv": {"block_size": 64}},
            [*[None] * 5, "kv.block_size is 64; takes 16 and 128"],
        ),
        (
            {"graph": {"mode": "PIECEWISE"}},
            [
                *[None] * 5,
                "graph.mode is PIECEWISE; used with NONE, FULL_DECODE_ONLY, FULL, "
                "FULL_AND_PIECEWISE",
            ],
        ),
    ],
)
def test_an_operator_that_is_off_is_used_nowhere(
    changes: dict[str, Any], off: list[str | None]
) -> None:
    fusions = decide(**changes)

    uses = [fusions.use(fusion.name, WIDTHS[fusion.name]) for fusion in FUSIONS]

    assert uses == [reason is None for reason in off]
    told = [None if text.startswith("in ") else text for text in fusions.report().values()]
    assert told == [None if reason is None else f"off ({reason})" for reason in off]


def test_an_unknown_cann_counts_as_an_old_one() -> None:
    fusions = decide(chip=Chip(A2.name, ""))

    assert not fusions.use("norm_quant", 1024)
    assert "CANN is of unknown version" in fusions.report()["norm_quant"]


def test_the_report_counts_places_and_names_widths_that_do_not_fit() -> None:
    fusions = decide()
    for width in (64, 48, 96, 48):
        fusions.use("swiglu_quant", width)

    assert fusions.report() == {
        "swiglu_quant": "in 2 places, not in 2 with rows of 48, which is no multiple of 32",
    }
    for width in (5120, 5152):
        fusions.use("expert_swiglu_quant", width)
    assert fusions.report()["expert_swiglu_quant"] == (
        "in 1 place, not in 1 with rows of 5152, which is more than 5120"
    )
    fusions.use("nz_weights", 48)
    assert fusions.report()["nz_weights"] == (
        "off (1 with matrices of 48 outputs, which is no multiple of 32)"
    )
    fusions.use("latent_prologue", 5120)
    assert fusions.report()["latent_prologue"] == (
        "off (1 with hidden states of 5120, which is not one of 6144, 7168, 7680)"
    )
    fusions.use("norm_quant", 48)
    assert fusions.report()["norm_quant"] == "in 1 place"
