"""All exceptions of this package, as a tree.

DistAclGraphError
  ConfigError             a key, its value, what is allowed
  MissingPackageError     a command needs a package that is not installed
  PlacementError          there are not enough NPUs in the cluster, or ports on a node
  WorkerError             a worker actor failed; names rank and phase
    WorkerStartTimeoutError, WorkerLostError, RankDisagreementError
      DeviceFaultError    a worker's device failed with a known error; its process runs
  DeviceError             the device or its runtime refused a call
    StreamExhaustedError, OutOfDeviceMemoryError, EmulatorBuildError
    NotBoundError         a rank is not bound to cores, but can run
  GraphError              planning, capture or replay of graphs
    CaptureError, ReplayMismatchError, StreamBudgetError
  KVCacheError            a rule of the KV cache was broken
    OutOfBlocksError
  ModelError              a checkpoint that cannot be served
    UnsupportedModelError, MissingTensorError
  RequestError            a mistake that a client may have made (a 4xx)
    RequestTooLongError, InvalidParameterError, UnknownModelError
      UnusableToolError   no grammar can be made for the arguments of some tools
  NonFiniteLogitsError    the model computed NaN or infinity for a request (a 500)
  GrammarError            a grammar reached a limit while a request was answered (a 500)
  NotAMessageError        bytes on one of our sockets that are not our message
  EngineUnavailableError  the engine cannot take requests now (a 503)
    EngineDeadError, QueueFullError
      RayDiedError        the Ray that was started for a deployment has died
  RollError               a group could not be replaced; says what each group runs now

Ray pickles errors to send them to other processes. Each error passes its fields to
``Exception.__init__``, because pickling requires this.
"""

from __future__ import annotations

from typing import Literal

# the reasons why a device refused a call
FailureCause = Literal["streams", "memory", "operator", "timeout"]
# The reasons why a device has stopped. stopped: the host stopped the device. link: a link failed.
# remote: perhaps another rank failed. retry: HCCL's retries failed. suspect: memory may be faulty.
# uce: memory is faulty, and it is unknown which data the memory contains. uce_kv: only memory of
# the KV cache is faulty. uce_tensor: memory of certain tensors is faulty. ecc: memory lost several
# bits at once. operator: a kernel failed.
DeviceFault = Literal[
    "stopped",
    "link",
    "remote",
    "retry",
    "suspect",
    "uce",
    "uce_kv",
    "uce_tensor",
    "ecc",
    "operator",
]


class DistAclGraphError(Exception):
    """Base class of all errors that this package raises deliberately."""


class ConfigError(DistAclGraphError):
    """A configuration value is unknown, ill-typed or out of range."""


class MissingPackageError(DistAclGraphError):
    """A command needs a package that is not installed. The message names the extra of dist_aclgraph
    that installs this package.
    """


class PlacementError(DistAclGraphError):
    """The cluster cannot place the workers: too few NPUs, too few ports, or no answer in time."""


class WorkerError(DistAclGraphError):
    """A worker failed.

    Attributes:
        rank: world rank of the worker, or -1 if the worker had no rank yet.
        phase: deployment state in which the worker failed, e.g. ``"LOADING"``.
    """

    def __init__(self, message: str, rank: int = -1, phase: str = "") -> None:
        super().__init__(message, rank, phase)
        self.rank = rank
        self.phase = phase

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.rank >= 0 else "a worker"
        return f"{where} in {self.phase}: {self.args[0]}" if self.phase else str(self.args[0])


class WorkerStartTimeoutError(WorkerError):
    """A worker did not finish a start-up phase within the phase's limit."""


class WorkerLostError(WorkerError):
    """A worker process died or stopped answering."""


class DeviceFaultError(WorkerLostError):
    """A worker's device stopped with a known error; the worker's process still runs.

    Attributes:
        fault: the reason why the device stopped.
    """

    def __init__(
        self, message: str, rank: int = -1, phase: str = "", fault: DeviceFault = "operator"
    ) -> None:
        super().__init__(message, rank, phase)
        self.args = (message, rank, phase, fault)
        self.fault = fault


class RankDisagreementError(WorkerError):
    """Ranks have different plans, or report different results where results must be equal."""


class DeviceError(DistAclGraphError):
    """The NPU or its runtime refused a call."""


class StreamExhaustedError(DeviceError):
    """No stream is left for another graph. CANN's message contains the code 207008 or 207005, or
    the words "sq cq".
    """


class OutOfDeviceMemoryError(DeviceError):
    """Device memory is exhausted."""


class NotBoundError(DeviceError):
    """A process is not bound to cores of the host; the message has the reason."""


class EmulatorBuildError(DeviceError):
    """The emulated CANN libraries did not build; the message has the compiler's output."""


class GraphError(DistAclGraphError):
    """Planning, capture or replay of a graph failed."""


class CaptureError(GraphError):
    """A bucket could not be captured, although there were enough streams and enough memory."""


class ReplayMismatchError(GraphError):
    """No graph can be replayed for a step: no graph was captured for the step's size, or the step's
    buffers or lengths do not fit the capture.
    """


class StreamBudgetError(GraphError):
    """A rank has too few streams for even the smallest bucket. The message lists, for each rank,
    the available, the required and the missing streams.
    """


class KVCacheError(DistAclGraphError):
    """A rule of the KV cache was broken."""


class OutOfBlocksError(KVCacheError):
    """The block pool has fewer free blocks than requested."""


class ModelError(DistAclGraphError):
    """A checkpoint cannot be served."""


class UnsupportedModelError(ModelError):
    """This package does not implement the architecture, or one of its options."""


# formats of weights that are not supported, by the suffix of the file
OTHER_WEIGHTS = {
    ".gguf": "GGUF file",
    ".bin": "file of PyTorch",
    ".pt": "file of PyTorch",
    ".pth": "file of PyTorch",
}
ONLY_SAFETENSORS = "only Hugging Face checkpoints of safetensors are supported"


class MissingTensorError(ModelError):
    """The checkpoint lacks a tensor, or the tensor has another shape."""


class RequestError(DistAclGraphError):
    """A request has a mistake, so it cannot be served.

    Attributes:
        param: name of the invalid request field, as in OpenAI's API; None if the error belongs to
            no field.
    """

    code: str | None = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.param = param

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidParameterError(RequestError):
    """A sampling or request parameter is ill-typed or out of range."""


class UnusableToolError(InvalidParameterError):
    """A request has tools whose argument schemas cannot be converted to a grammar.

    Attributes:
        tools: names of these tools. The message describes the first of these tools.
    """

    def __init__(self, message: str, param: str | None = None, tools: tuple[str, ...] = ()) -> None:
        super().__init__(message, param)
        self.args = (message, param, tools)
        self.tools = tools


class RequestTooLongError(RequestError):
    """Prompt and requested tokens exceed the model's context."""

    code = "context_length_exceeded"


class UnknownModelError(RequestError):
    """The request names a model that this deployment does not serve."""

    code = "model_not_found"


class NonFiniteLogitsError(DistAclGraphError):
    """The model computed NaN or infinity for a request, so there is no next token."""


class GrammarError(DistAclGraphError):
    """The tokens that the grammar of a request allows next cannot be computed."""


class NotAMessageError(DistAclGraphError):
    """Bytes from a socket of this package are not a message of this package."""


class EngineUnavailableError(DistAclGraphError):
    """The engine cannot accept the request now. A retry at a later time may succeed."""


class EngineDeadError(EngineUnavailableError):
    """The engine has failed; the message contains the first cause."""


class RayDiedError(EngineDeadError):
    """A deployment has died, because the Ray that was started for the deployment has died."""


class QueueFullError(EngineUnavailableError):
    """Too many requests are waiting."""


class RollError(DistAclGraphError):
    """Some groups now run another configuration, but the next group could not be replaced.

    All serving groups continue. The message has the configuration of each group, and says how to
    continue.
    """
