"""The fused operators for layers with int8 products, and the storage format of int8 weights. Each
of these operators, and the format, works only with some chips, versions and types.

These limits come from the documents and sources of CANN's operators (ops-nn) and of torch_npu
(op-plugin). None of these limits was tested on an NPU. A fused operator and separate operators
round their results differently. The fused operator quantises float32 values. Separate operators
first round the values to the type of the activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dist_aclgraph.config import Config, FusionName
from dist_aclgraph.config.chips import generation_of
from dist_aclgraph.config.device import UNKNOWN_CANN
from dist_aclgraph.planning.chip import Chip


@dataclass(frozen=True)
class Fusion:
    """A fused operator.

    Attributes:
        operator: the operator's name in torch_npu.
        generations: the generations of chips that have the operator.
        cann: the oldest supported CANN that has the operator.
        lines: the release series of torch_npu that have the operator.
        dtypes: the types of activations with which the operator works.
        multiple: the width of the quantised rows must be a multiple of this number.
        widest: maximum width of the quantised rows; None if there is no maximum.
        widths: the only possible widths of the quantised rows; empty if all widths are possible.
        block_sizes: possible sizes of KV blocks; empty if all sizes are possible.
        modes: possible values of graph.mode; empty if all values are possible.
        needs: name of another fusion that this operator requires; None if it requires no other
            fusion.
        place: the report's text for places of the model where the operator fits; {} stands for the
            width.
    """

    name: FusionName
    operator: str
    dtypes: tuple[str, ...]
    multiple: int = 1
    widest: int | None = None
    widths: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    needs: FusionName | None = None
    place: str = "rows of {}"
    generations: tuple[str, ...] = ("A2", "A3")
    cann: tuple[int, ...] = (8, 5)
    lines: tuple[str, ...] = ("2.10", "2.12", "2.13")

    def obstacle(self, config: Config, chip: Chip, line: str) -> str | None:
        """Return the reason why no layer can use the operator; None if layers can use it. A layer
        must also have a suitable width (``misfit``).

        Args:
            line: release series of torch_npu, e.g. 2.13.
        """
        chosen = config.device.fusions
        if chosen == "none" or (chosen != "auto" and self.name not in chosen):
            return "not in device.fusions"
        if generation_of(chip.name) not in self.generations:
            return f"known on {' and '.join(self.generations)}, not on {chip.name}"
        if chip.is_cann_before(*self.cann):
            oldest = ".".join(map(str, self.cann))
            return f"CANN is {chip.cann or UNKNOWN_CANN}; needs {oldest}"
        if line not in self.lines:
            return f"torch_npu is {line}; known in {', '.join(self.lines)}"
        if config.dtype not in self.dtypes:
            return f"dtype is {config.dtype}; takes {' and '.join(self.dtypes)}"
        size = config.kv.block_size
        if self.block_sizes and size not in self.block_sizes:
            return f"kv.block_size is {size}; takes {' and '.join(map(str, self.block_sizes))}"
        if self.modes and config.graph.mode not in self.modes:
            return f"graph.mode is {config.graph.mode}; used with {', '.join(self.modes)}"
        return None

    def misfit(self, width: int) -> str | None:
        """Return why the operator cannot process rows of this width; None if it can."""
        if width % self.multiple:
            return f"{self.place.format(width)}, which is no multiple of {self.multiple}"
        if self.widest is not None and width > self.widest:
            return f"{self.place.format(width)}, which is more than {self.widest}"
        if self.widths and width not in self.widths:
            known = ", ".join(map(str, self.widths))
            return f"{self.place.format(width)}, which is not one of {known}"
        return None


FUSIONS = (
    Fusion(
        "norm_quant",
        "npu_add_rms_norm_dynamic_quant",  # replaces npu_add_rms_norm and npu_dynamic_quant
        dtypes=("bfloat16", "float16"),
    ),
    Fusion(
        "swiglu_quant",
        "npu_dequant_swiglu_quant",  # replaces npu_swiglu and npu_dynamic_quant
        dtypes=("bfloat16",),
        multiple=32,  # The width of gate and up together must be a multiple of 64.
    ),
    Fusion(
        "routing_quant",
        "npu_moe_init_routing_v2 with quant_mode 1",  # replaces npu_dynamic_quant
        dtypes=("bfloat16", "float16"),
    ),
    Fusion(
        "expert_swiglu_quant",
        # This operator replaces npu_grouped_matmul and the one or two operators after it. CANN 8.5
        # has only version 1 of this operator. Version 1 requires cumulative row counts of the
        # experts, but the operator that sorts rows does not compute them in CANN 8.5.
        "npu_grouped_matmul_swiglu_quant_v2",
        dtypes=("bfloat16", "float16"),
        # the kernel writes rows without gaps, and each row must begin at a multiple of 32 bytes
        multiple=32,
        widest=5120,  # the width of gate and up together is at most 10240
        cann=(9, 0),
    ),
    Fusion(
        "nz_weights",
        # This entry is a storage format, not an operator. The results of products do not depend on
        # the format.
        "npu_quant_matmul and npu_grouped_matmul with weights in FRACTAL_NZ",
        dtypes=("bfloat16", "float16"),
        # Only full blocks of the format are allowed. Weights in partial blocks would need more
        # memory than in the format ND.
        multiple=32,
        place="matrices of {} outputs",
    ),
    Fusion(
        "latent_prologue",
        # This operator replaces all operators after a layer's norm and before latent attention.
        # CANN 8.5 is not supported, because its published sources have the operator's arguments in
        # another order. Documents of later versions of CANN also allow sizes that this entry does
        # not allow.
        "npu_mla_prolog_v3",
        dtypes=("bfloat16",),
        widths=(6144, 7168, 7680),
        block_sizes=(16, 128),
        # Piecewise graphs end before the cache is written, so they must use separate operators.
        modes=("NONE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"),
        needs="nz_weights",
        cann=(9, 0),
        place="hidden states of {}",
    ),
)


class Fusions:
    """Says which fused operators one rank uses. The decision is made before the rank's weights are
    loaded.

    The loader calls ``use`` once for each place of the model where an operator fits. This object
    counts the places for the report.
    """

    def __init__(self, obstacles: Mapping[FusionName, str | None]) -> None:
        """Args:
        obstacles: for each operator, the reason why no place of the model may use the operator;
            None if there is no such reason.
        """
        self._obstacles = obstacles
        self._fusions = {fusion.name: fusion for fusion in FUSIONS}
        self._wanted: set[FusionName] = set()
        self._places: Counter[FusionName] = Counter()
        self._misfits: Counter[tuple[FusionName, str]] = Counter()

    @classmethod
    def decide(cls, config: Config, chip: Chip, line: str) -> Fusions:
        """Decide which fused operators a rank uses. The decision depends on the chip, on its CANN,
        and on the release series of torch_npu.
        """
        obstacles = {fusion.name: fusion.obstacle(config, chip, line) for fusion in FUSIONS}
        for fusion in FUSIONS:
            if fusion.needs and obstacles[fusion.name] is None and obstacles[fusion.needs]:
                obstacles[fusion.name] = f"needs {fusion.needs}"
        return cls(obstacles)

    @classmethod
    def none(cls) -> Fusions:
        """Return a decision that uses no fused operator."""
        return cls({fusion.name: "not in device.fusions" for fusion in FUSIONS})

    def use(self, name: FusionName, width: int) -> bool:
        """Return whether a place of the model uses the operator ``name``. If true, count the place.

        Args:
            width: number of elements of an int8 row at this place; for nz_weights, the number of
                outputs.
        """
        self._wanted.add(name)
        if self._obstacles[name] is not None:
            return False
        if (misfit := self._fusions[name].misfit(width)) is not None:
            self._misfits[name, misfit] += 1
            return False
        self._places[name] += 1
        return True

    def report(self) -> dict[str, str]:
        """Return, for each operator, how many places of the model use it, or why no place uses it.
        Operators for which the model has no place are omitted.
        """
        return {name: self._describe(name) for name in self._fusions if name in self._wanted}

    def _describe(self, name: FusionName) -> str:
        if (obstacle := self._obstacles[name]) is not None:
            return f"off ({obstacle})"
        misfits = ", ".join(
            f"{count} with {misfit}"
            for (other, misfit), count in sorted(self._misfits.items())
            if other == name
        )
        if places := self._places[name]:
            found = f"in {places} place{'s' if places > 1 else ''}"
            return found + (f", not in {misfits}" if misfits else "")
        return f"off ({misfits})"
